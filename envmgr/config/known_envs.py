"""Well-known packages by the ids of the envs that they register with gymnasium when imported.

Gymnasium imports no package for an id, so `ALE/Pong-v5` is unknown until somebody imports `ale_py`.
This table says which module has to be imported for which ids. A config file may have these modules
imported without being allowed to: docs/security.md says what that rests on.

To add a package: read its registrations, and what its envs do with their arguments. If one of these
can name code, a program, or a place to write to, `plain_arguments` is False.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from envmgr.config.checks import nearest


@dataclass(frozen=True)
class KnownPackage:
    """A package whose import registers envs.

    Attributes:
        module: the module to import.
        distribution: the distribution to install.
        source: file of its repository on GitHub that registers the envs.
        namespaces: namespaces of their ids: the part before a slash.
        ids: patterns of ids without a namespace; `*` stands for anything.
        plain_arguments: whether the arguments of its envs are settings and paths to read, as far as
            its code has been read. If not, a config file gives none.
        class_modules: modules whose classes of envs and wrappers a config file may name.
    """

    module: str
    distribution: str
    source: str
    namespaces: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    plain_arguments: bool = True
    class_modules: tuple[str, ...] = ()

    @property
    def top(self) -> str:
        """The top-level module."""
        return self.module.partition(".")[0]

    def has(self, env_id: str) -> bool:
        """Return whether an id looks like one of its envs."""
        namespace, slash, _ = env_id.partition("/")
        if slash:
            return namespace in self.namespaces
        return any(fnmatchcase(env_id, pattern) for pattern in self.ids)


# Games of the Atari ids without a namespace, `Pong-v4` and older; others have their own marks.
_ATARI = (
    *("Adventure", "AirRaid", "Alien", "Amidar", "Assault", "Asterix", "Asteroids"),
    *("Atlantis", "BankHeist", "BattleZone", "BeamRider", "Berzerk", "Bowling", "Boxing"),
    *("Breakout", "Carnival", "Centipede", "ChopperCommand", "CrazyClimber", "Defender"),
    *("DemonAttack", "DoubleDunk", "ElevatorAction", "Enduro", "FishingDerby", "Freeway"),
    *("Frostbite", "Gopher", "Gravitar", "Hero", "IceHockey", "Jamesbond", "JourneyEscape"),
    *("Kangaroo", "Krull", "KungFuMaster", "MontezumaRevenge", "MsPacman", "NameThisGame"),
    *("Phoenix", "Pitfall", "Pong", "Pooyan", "PrivateEye", "Qbert", "Riverraid"),
    *("RoadRunner", "Robotank", "Seaquest", "Skiing", "Solaris", "SpaceInvaders"),
    *("StarGunner", "Tennis", "TimePilot", "Tutankham", "UpNDown", "Venture"),
    *("VideoPinball", "WizardOfWor", "YarsRevenge", "Zaxxon"),
)

KNOWN_PACKAGES: tuple[KnownPackage, ...] = (
    KnownPackage(
        "ale_py",
        "ale-py",
        "Farama-Foundation/Arcade-Learning-Environment: src/ale/python/registration.py",
        namespaces=("ALE",),
        ids=(
            *("*NoFrameskip-v[04]", "*Deterministic-v[04]", "*-ram-v[04]"),
            *(f"{game}-v[04]" for game in _ATARI),
        ),
    ),
    KnownPackage(
        "minigrid",
        "minigrid",
        "Farama-Foundation/Minigrid: minigrid/__init__.py",
        ids=("MiniGrid-*", "BabyAI-*"),
        class_modules=("minigrid.wrappers",),
    ),
    KnownPackage(
        "miniworld",
        "miniworld",
        "Farama-Foundation/Miniworld: miniworld/envs/__init__.py",
        ids=("MiniWorld-*",),
    ),
    KnownPackage(
        "gymnasium_robotics",
        "gymnasium-robotics",
        "Farama-Foundation/Gymnasium-Robotics: gymnasium_robotics/__init__.py",
        ids=(
            *("FetchSlide*", "FetchPickAndPlace*", "FetchReach*", "FetchPush*", "HandReach*"),
            *("HandManipulate*", "AntMaze_*", "PointMaze_*", "AdroitHand*", "FrankaKitchen-v*"),
        ),
    ),
    KnownPackage(
        "metaworld",
        "metaworld",
        "Farama-Foundation/Metaworld: metaworld/__init__.py",
        namespaces=("Meta-World",),
    ),
    KnownPackage(
        "mo_gymnasium",
        "mo-gymnasium",
        "Farama-Foundation/MO-Gymnasium: mo_gymnasium/envs",
        ids=(
            *("mo-*", "deep-sea-treasure-*", "minecart-*", "breakable-bottles-v*", "fishwood-v*"),
            *("four-room-v*", "fruit-tree-v*", "resource-gathering-v*", "water-reservoir-v*"),
        ),
        plain_arguments=False,  # mo-highway's, as those of highway_env
    ),
    KnownPackage(
        "highway_env",
        "highway-env",
        "Farama-Foundation/HighwayEnv: highway_env/__init__.py",
        ids=(
            *("highway-v*", "highway-fast-v*", "merge-v*", "merge-generic-v*", "exit-v*"),
            *("intersection-v*", "intersection-multi-agent-v*", "roundabout-v*"),
            *("roundabout-generic-v*", "parking-*", "racetrack-*", "lane-keeping-v*"),
            *("two-way-v*", "u-turn-v*", "random-road-v*"),
        ),
        plain_arguments=False,  # `config` names classes to import
    ),
    KnownPackage(
        "shimmy",
        "shimmy",
        "Farama-Foundation/Shimmy: shimmy/registration.py",
        namespaces=("dm_control", "bsuite"),
        ids=("GymV2[16]Environment*",),
        plain_arguments=False,  # `env_id` of the last two names a module to import
    ),
    KnownPackage(
        "miniwob",
        "miniwob",
        "Farama-Foundation/miniwob-plusplus: miniwob/registration.py",
        namespaces=("miniwob",),
        plain_arguments=False,  # `base_url` is opened in a browser
    ),
    KnownPackage(
        "vizdoom.gymnasium_wrapper",
        "vizdoom",
        "Farama-Foundation/ViZDoom: gymnasium_wrapper/__init__.py",
        ids=("Vizdoom*",),
        plain_arguments=False,  # `level` is a file that names a program
    ),
    KnownPackage(
        "panda_gym",
        "panda-gym",
        "qgallouedec/panda-gym: panda_gym/__init__.py",
        ids=(
            *("PandaReach*", "PandaSlide*", "PandaPush*", "PandaPickAndPlace*", "PandaStack*"),
            "PandaFlip*",
        ),
    ),
    KnownPackage(
        "pybullet_envs_gymnasium",
        "pybullet-envs-gymnasium",
        "araffin/pybullet_envs_gymnasium: pybullet_envs_gymnasium/__init__.py",
        ids=("*BulletEnv-v0",),
    ),
    KnownPackage(
        "PyFlyt.gym_envs",
        "PyFlyt",
        "jjshoots/PyFlyt: PyFlyt/gym_envs/__init__.py",
        namespaces=("PyFlyt",),
        plain_arguments=False,  # not all of what drones are built from has been read
    ),
    KnownPackage(
        "safety_gymnasium",
        "safety-gymnasium",
        "PKU-Alignment/safety-gymnasium: safety_gymnasium/__init__.py",
        ids=("Safety*Gymnasium-v*",),
        plain_arguments=False,  # `env_id` names a module to import
    ),
    KnownPackage(
        "gym_aloha",
        "gym-aloha",
        "huggingface/gym-aloha: gym_aloha/__init__.py",
        namespaces=("gym_aloha",),
    ),
    KnownPackage(
        "gym_pusht",
        "gym-pusht",
        "huggingface/gym-pusht: gym_pusht/__init__.py",
        namespaces=("gym_pusht",),
    ),
    KnownPackage(
        "nle",
        "nle",
        "heiner/nle: nle/env/__init__.py",
        ids=(
            *("NetHack-v*", "NetHackScore-v*", "NetHackStaircase*", "NetHackOracle-v*"),
            *("NetHackGold-v*", "NetHackEat-v*", "NetHackScout-v*", "NetHackChallenge-v*"),
        ),
        plain_arguments=False,  # `savedir` is written to
    ),
    KnownPackage(
        "minihack",
        "minihack",
        "samvelyan/minihack: minihack/__init__.py",
        ids=("MiniHack-*",),
        plain_arguments=False,  # as those of nle
    ),
    KnownPackage(
        "craftium",
        "craftium",
        "mikelma/craftium: craftium/__init__.py",
        namespaces=("Craftium",),
        plain_arguments=False,  # `minetest_dir` holds a program
    ),
    KnownPackage(
        "flappy_bird_gymnasium",
        "flappy-bird-gymnasium",
        "markub3327/flappy-bird-gymnasium: flappy_bird_gymnasium/__init__.py",
        ids=("FlappyBird-v*",),
    ),
    KnownPackage(
        "tetris_gymnasium.envs",
        "tetris-gymnasium",
        "Max-We/Tetris-Gymnasium: tetris_gymnasium/envs/__init__.py",
        namespaces=("tetris_gymnasium",),
    ),
    KnownPackage(
        "gym_anytrading",
        "gym-anytrading",
        "AminHP/gym-anytrading: gym_anytrading/__init__.py",
        ids=("forex-v*", "stocks-v*"),
    ),
    KnownPackage(
        "sumo_rl",
        "sumo-rl",
        "LucasAlegre/sumo-rl: sumo_rl/environment/__init__.py",
        ids=("sumo-rl-v*",),
        plain_arguments=False,  # files to write, and arguments of a program
    ),
)

CLASS_MODULES = tuple(name for known in KNOWN_PACKAGES for name in known.class_modules)
"""Modules whose classes of envs and wrappers a config file may name."""


def package_of_id(env_id: str) -> KnownPackage | None:
    """Return the package whose import registers an env, by its id."""
    return next((known for known in KNOWN_PACKAGES if known.has(env_id)), None)


def package_of_module(module: str) -> KnownPackage | None:
    """Return the package that is imported as `module`, exactly."""
    return next((known for known in KNOWN_PACKAGES if known.module == module), None)


def package_around(module: str) -> KnownPackage | None:
    """Return the package that a module is part of."""
    top = module.partition(".")[0]
    return next((known for known in KNOWN_PACKAGES if known.top == top), None)


def package_of_classes(module: str) -> KnownPackage | None:
    """Return the package of a module, if a config file may name its env and wrapper classes."""
    return next((known for known in KNOWN_PACKAGES if module in known.class_modules), None)


def nearest_package(env_id: str) -> tuple[str, KnownPackage] | None:
    """Return the beginning that an unknown id may have been meant to have, and its package."""
    namespace, slash, _ = env_id.partition("/")
    begins = namespace if slash else env_id.partition("-")[0]
    heads = {
        head: known
        for known in KNOWN_PACKAGES
        for head in (known.namespaces if slash else _heads_of(known.ids))
    }
    alike = nearest(begins, heads)
    return None if alike is None else (alike, heads[alike])


def _heads_of(patterns: tuple[str, ...]) -> list[str]:
    return [pattern.partition("-")[0].strip("*_") for pattern in patterns if pattern[-1] == "*"]
