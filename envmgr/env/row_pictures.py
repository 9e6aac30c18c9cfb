"""What is saved of the episodes of a vector env's rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from envmgr.env.contract import EnvContractError, describe, env_name
from envmgr.env.pictures import FRAME_MODES, EpisodePictures, fps_of
from envmgr.errors import ConfigError


class RowPictures:
    """The pictures of those rows of a vector env of which any are saved.

    Args:
        env: the vector env; its `render` gives a frame of each row.

    Attributes:
        rows: the pictures of each of them.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self.rows: dict[int, EpisodePictures] = {}

    def of(self, row: int, env_id: int) -> EpisodePictures:
        """Return the pictures of a row, from now on.

        Raises:
            ConfigError: the env gives no frames.
        """
        mode = getattr(self._env, "render_mode", None)
        if mode not in FRAME_MODES:
            raise ConfigError(
                f"{env_name(self._env)} cannot save videos or figures: its render_mode is "
                f"{mode!r}; build it with render_mode='rgb_array'"
            )
        return self.rows.setdefault(row, EpisodePictures(env_id, fps_of(self._env)))

    def begun(self, rows: Sequence[int]) -> None:
        """Episodes of rows have begun."""
        frames = self._frames()
        for row in self.rows.keys() & set(rows):
            self.rows[row].begun(functools.partial(frames, row))

    def stepped(self, rows: Sequence[int], ended: Collection[int], *, shows_next: bool) -> None:
        """Rows have taken a step.

        Args:
            rows: which.
            ended: those of all whose episodes ended with it.
            shows_next: of these the env shows the next episode already.
        """
        frames = self._frames()
        for row in self.rows.keys() & set(rows):
            is_gone = shows_next and row in ended
            frame = None if is_gone else functools.partial(frames, row)
            self.rows[row].stepped(frame, ended=row in ended)

    def leave(self, row: int) -> None:
        """A row takes no part any more."""
        pictures = self.rows.pop(row, None)
        if pictures is not None:
            pictures.close()

    def _frames(self) -> Callable[[int], Any]:
        """Return what gives the frame of a row; all are rendered once, if any is asked for."""
        render = functools.cache(self._env.render)

        def frame_of(row: int) -> Any:
            frames = render()
            try:
                return frames[row]
            except (TypeError, LookupError):
                raise EnvContractError(
                    f"render of {env_name(self._env)} should return a frame of each row, it "
                    f"returned {describe(frames)}"
                ) from None

        return frame_of
