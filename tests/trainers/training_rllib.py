"""The guide's example of RLlib. Ray leaves files open in its process: no leak guard looks here."""

from __future__ import annotations

from tests.docs.test_examples import PROGRAMS, run_program


def test_rllib_trains() -> None:
    (program,) = (it for it in PROGRAMS if "from ray.rllib" in it.source)
    run_program(program, program.blocks[0].page)
