"""Saves videos and last frames of the episodes of an env or of a vector env's rows."""

from __future__ import annotations

import functools
import logging
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from envmgr.env.contract import EnvContractError, describe, env_name
from envmgr.env.figures import write_png
from envmgr.env.videos import Video, import_av, next_number, sweep
from envmgr.errors import ConfigError

logger = logging.getLogger("envmgr")

DEFAULT_FPS = 30.0

FRAME_MODES = ("rgb_array", "rgb_array_list")
"""Render modes that give frames."""


def fps_of(env: Any) -> Any:
    """Return the frames per second that an env states in its metadata, whatever value that is."""
    metadata = getattr(env, "metadata", None)
    return metadata.get("render_fps") if isinstance(metadata, Mapping) else None


class EpisodePictures:
    """A recorder that saves videos and last frames of one env's episodes, if these are enabled.

    In envs of your own, call `begun` after each reset, `stepped` after each step, and `close`.
    `GymnasiumEnv` and `VectorBatch` do so themselves.

    Args:
        env_id: the env_id in file names.
        fps: frames per second of videos.

    Attributes:
        env_id: the env_id in file names.
        fps: frames per second, from the next video on.
    """

    def __init__(self, env_id: int = 0, fps: Any = None) -> None:
        self.env_id = env_id
        is_number = isinstance(fps, (int, float)) and not isinstance(fps, bool)
        self.fps = float(fps) if is_number and 0 < fps <= 1000 else DEFAULT_FPS
        self._folder: str | None = None
        self._next = 0
        self._video: Video | None = None
        self._has_stepped = False  # in the present episode
        self._figure_folder: str | None = None
        # Renewed envs of the same id save into the same folder and must not overwrite anything.
        self._unique = uuid.uuid4().hex[:8]
        self._n_figures = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> EpisodePictures:
        """Return itself: the copy of an env continues the same video."""
        return self

    def save_videos(self, folder: str) -> None:
        """Save a video of each episode that begins from now on; the folder is created if needed.

        Videos are named `<folder>/env_<env_id>-episode_<number>.mp4`; the numbers continue from
        those that are already there for this env_id. A video in progress is finished first.

        Raises:
            MissingDependencyError: PyAV is not installed.
            OSError: the folder cannot be created.
        """
        import_av()
        self._finish()
        os.makedirs(folder, exist_ok=True)
        sweep((folder,))
        self._folder, self._next = folder, next_number(folder, self._stem)

    def serve(self, env_id: int) -> None:
        """Continue as another env_id, even the video of an episode that has had no step yet."""
        if self._has_stepped:
            self._finish()
        self.env_id = env_id
        if self._folder is not None:
            self._next = next_number(self._folder, self._stem)

    def save_figures(self, folder: str) -> None:
        """Save the last frame of each episode as `<folder>/env_<env_id>-<unique>-<number>.png`.

        Raises:
            OSError: the folder cannot be created.
        """
        os.makedirs(folder, exist_ok=True)
        self._figure_folder = folder

    def begun(self, frame: Callable[[], Any]) -> None:
        """Note that an episode has begun.

        Args:
            frame: returns the current frame, `(height, width, 3)` of uint8, or a list that ends
                with it; called only if the frame is needed.
        """
        self._finish()
        self._has_stepped = False
        if self._folder is not None:
            self._write(frame, self._folder)

    def stepped(self, frame: Callable[[], Any] | None, *, ended: bool) -> None:
        """Note that a step was taken.

        Args:
            frame: as in `begun`; None if the env already shows the next episode.
            ended: whether the step was the last of its episode.
        """
        self._has_stepped = True
        wants_figure = ended and self._figure_folder is not None
        if frame is not None and (wants_figure or self._video is not None):
            image = last_of(frame())
            if self._video is not None:
                self._write(lambda: image, self._video)
            if wants_figure:
                self._save_figure(self._figure_folder or "", image)
        if ended:
            self._finish()

    def close(self) -> None:
        """Finish the video of an episode that is under way."""
        self._finish()

    @property
    def _stem(self) -> str:
        return f"env_{self.env_id}"

    def _save_figure(self, folder: str, image: Any) -> None:
        name = f"{self._stem}-{self._unique}-{self._n_figures:06d}.png"
        try:
            write_png(os.path.join(folder, name), image)
        except OSError as error:  # as in `_give_up`
            logger.warning("the figure %s in %s is lost: %s", name, folder, error)
        self._n_figures += 1

    def _write(self, frame: Callable[[], Any], into: Video | str) -> None:
        image = last_of(frame())
        try:
            self._video = Video(into, self.fps) if isinstance(into, str) else into
            self._video.add(image)
        except OSError as error:
            self._give_up(error)

    def _finish(self) -> None:
        video, self._video = self._video, None
        if video is None:
            return
        try:
            _, number = video.finish(self._stem, self._next)
            self._next = number + 1
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Discard the video with a warning: a full disk is not a failure of the env."""
        video, self._video = self._video, None
        if video is not None:
            video.discard()
        logger.warning(
            "the video of an episode of env %s in %s is lost: %s", self.env_id, self._folder, error
        )


def last_of(rendered: Any) -> Any:
    """Return the last frame of what an env renders: a frame, or a list of them."""
    return rendered[-1] if isinstance(rendered, list) and rendered else rendered


def film(env: Any, pictures: EpisodePictures, frame: Callable[[], Any]) -> None:
    """Have `pictures` notified of each reset and step of a gymnasium env.

    The env remains the same object, since the code that takes its steps holds on to that object.

    Args:
        env: the outermost wrapper.
        pictures: notified of the resets and steps.
        frame: returns the current frame.
    """
    if not is_filmed(env.step):
        filmed = _Filmed(env, pictures, frame)
        env.reset, env.step = filmed.reset, filmed.step


def is_filmed(method: Any) -> bool:
    """Return whether an attribute of an env is one that `film` has put there."""
    return isinstance(getattr(method, "__self__", None), _Filmed)


class _Filmed:
    """The `reset` and `step` of an env, which notify its `EpisodePictures` afterwards."""

    def __init__(self, env: Any, pictures: EpisodePictures, frame: Callable[[], Any]) -> None:
        self._reset, self._step = env.reset, env.step
        self._pictures = pictures
        self._frame = frame

    def reset(self, **arguments: Any) -> Any:
        result = self._reset(**arguments)
        self._pictures.begun(self._frame)
        return result

    def step(self, action: Any) -> Any:
        result = self._step(action)
        if isinstance(result, tuple) and len(result) == 5:  # else it is refused
            ended = bool(result[2]) or bool(result[3])
            self._pictures.stepped(self._frame, ended=ended)
        return result


class RowPictures:
    """The pictures of a vector env's rows, for those rows of which any are saved.

    Args:
        env: the vector env; its `render` gives a frame of each row.

    Attributes:
        rows: the pictures of each of these rows.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self.rows: dict[int, EpisodePictures] = {}

    def of(self, row: int, env_id: int) -> EpisodePictures:
        """Return the pictures of a row, which are notified of its episodes from now on.

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
        """Note that episodes of rows have begun."""
        frames = self._frames()
        for row in self.rows.keys() & set(rows):
            self.rows[row].begun(functools.partial(frames, row))

    def stepped(self, rows: Sequence[int], ended: Collection[int], *, shows_next: bool) -> None:
        """Note that rows have taken a step.

        Args:
            rows: the rows that took it.
            ended: those of all rows whose episodes ended with it.
            shows_next: whether the env already shows the next episode of the rows in `ended`.
        """
        frames = self._frames()
        for row in self.rows.keys() & set(rows):
            is_gone = shows_next and row in ended
            frame = None if is_gone else functools.partial(frames, row)
            self.rows[row].stepped(frame, ended=row in ended)

    def leave(self, row: int) -> None:
        """Note that a row no longer takes part."""
        pictures = self.rows.pop(row, None)
        if pictures is not None:
            pictures.close()

    def _frames(self) -> Callable[[int], Any]:
        """Return a function from row to frame; it renders all rows once, if any is asked for."""
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
