"""Other people's interfaces to a manager, each in a module that is imported when it is used.

Adapters are thin. They use what is public of a manager, and nothing below it. What all of them need
is here once:

- `batches.FixedBatches` steps and resets all envs of a manager as rows, in the order of env_ids: it
  refuses managers that may lose rows, gathers all rows of `async_subprocess` too, and applies
  `on_failure`. An adapter calls `reset`, `send` and `receive`, and `first_obs` for the envs whose
  episodes have ended.
- `on_failure` has what becomes of a failed env: `plain_info` cleans an info of what is the
  manager's own and turns errors into text; `raise_in_trainer` is what `on_failure="raise"` does.
- `requirements.missing` is the error for a trainer that is not installed.

A module imports its trainer at its top: nothing imports the module before it is asked for.
"""
