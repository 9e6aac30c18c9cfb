"""The page of the layers of the code, and of what becomes of a request."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import envmgr
from envmgr.core import phases
from envmgr.core.phases import CHANGES, Change
from envmgr.core.replies import AWAITED_IN
from envmgr.wire import messages
from envmgr.wire.messages import Op
from generating.docstrings import table
from generating.lifecycle_page import meanings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PACKAGE = Path(envmgr.__file__).resolve().parent
_FIRST_REPLY = Op.HELLO
_CLOSE = '%%{init: {"flowchart": {"rankSpacing": 18, "nodeSpacing": 20}}}%%'


def architecture_page() -> str:
    """Return the page of the layers, and of the requests and their replies."""
    texts = meanings(messages, Op)
    requests = [(f"`{op.name}`", texts[op.name]) for op in Op if op < _FIRST_REPLY]
    replies = [(f"`{op.name}`", texts[op.name]) for op in Op if op >= _FIRST_REPLY]
    return f"""# Architecture

This page is generated from the contracts in `pyproject.toml` and from tables in the code.
[Decision 0038](../decisions/0038-a-core-to-live-in.md) says why the code is divided in this way,
and [CONTRIBUTING](../../CONTRIBUTING.md#where-is-x-decided) says where each question is decided.

## Layers

A module imports only from layers below its own; `make lint` checks this.

```mermaid
{_layers_diagram()}
```

{table(("module", "what it is"), _modules())}
## The life of a request

A call by the trainer becomes a request to the env's host. Until the reply has come, the env's
*phase* says what the host is busy with. `FAILED` is a possible reply in each of these phases. The
timestep of a step that was posted in shared memory is found there, without a message, unless the
step is looked after individually. [The life of one step](../life-of-a-step.md) follows a step
through the code.

```mermaid
{_requests_diagram()}
```

Which phase may follow which is listed in [lifecycle](lifecycle.md#phases).

## Requests

{table(("request", "what it asks for"), requests)}
## Replies

{table(("reply", "what it says"), replies)}"""


def _layers() -> list[list[str]]:
    """Return the modules of each layer, from the top."""
    project = tomllib.loads((_PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    lines = next(c["layers"] for c in contracts if c["type"] == "layers")
    return [
        [name.strip().strip("()") for name in line.replace("|", ":").split(":")] for line in lines
    ]


def _layers_diagram() -> str:
    nodes = [f'    L{i}["{"<br>".join(_rows(names))}"]' for i, names in enumerate(_layers())]
    chain = " --> ".join(f"L{i}" for i in range(len(nodes)))
    return "\n".join([_CLOSE, "flowchart TB", *nodes, f"    {chain}"])


def _rows(names: list[str], width: int = 4) -> list[str]:
    return [" · ".join(names[i : i + width]) for i in range(0, len(names), width)]


def _modules() -> Iterator[tuple[str, str]]:
    """Return every module of a layer, with the first line of its docstring."""
    for names in _layers():
        for name in names:
            file = _PACKAGE / name / "__init__.py"
            file = file if file.is_file() else _PACKAGE / f"{name}.py"
            text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            yield f"`{name}`", " ".join(text.partition("\n\n")[0].split())


def _requests_diagram() -> str:
    """Return a diagram of what leads into and out of the phases in which a reply is awaited."""
    awaited = [phase for phase in phases.Phase if phase in phases.AWAITED | {phases.Phase.POSTED}]
    lines = [_CLOSE, "flowchart LR"]
    for change, targets in CHANGES.items():
        source, target = next(iter(targets.items()))
        if change in (Change.TAKE_OVER, Change.CANCEL):
            lines.append(f'    {source.name} -- "{change.value}" --> {target.name}')
        elif target in awaited:
            lines.append(f'    {change.name}_(["{change.value}"]) --> {target.name}')
    for op, where in AWAITED_IN.items():
        if op not in (Op.FAILED, Op.BEGAN):
            lines += [
                f"    {p.name} --> {Op(op).name}([{Op(op).name}])" for p in awaited if p in where
            ]
    return "\n".join(lines)
