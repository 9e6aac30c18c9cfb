"""Managers with the interfaces of other libraries, each in a module that is imported on use.

Adapters are thin: they use the public interface of a manager, and nothing below it. What all of
them need is here once:

- `batches.FixedBatches` steps and resets all envs of a manager as rows, in the order of env_ids. It
  refuses managers that may lose rows, gathers all rows of `async_subprocess` too, and applies
  `on_failure`. An adapter calls `reset`, `send` and `receive`, and `first_obs` for the envs whose
  episodes have ended.
- `on_failure` handles failed envs: `plain_info` removes the manager's own keys from an info and
  turns errors into text; `raise_in_trainer` implements `on_failure="raise"`.

Each module imports its trainer at its top; nothing imports the module before it is needed.
"""
