"""How decode runs: options as given, and the plan made of them. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_stream.config import ConfigError, StreamConfig
from mlx_stream.decode.policy import DEFAULT_POLICY, POLICIES
from mlx_stream.decode.seed_policy import DEFAULT_SEED_POLICY, SEED_POLICIES

PATHS = ("auto", "exact", "staged", "hot", "whole-layer")
PREDICTORS = ("auto", "off", "lookahead", "previous")
PREROUTER_MODES = ("auto", "on", "off")


@dataclass(frozen=True)
class DecodeOptions:
    """Options of decoding.

    Attributes:
        path: one of PATHS. ``exact`` reads what is missing when the router has spoken; ``hot``
            computes a whole token from the cache without asking the host, and takes it again on
            the exact path when an expert was missing; ``staged`` is hot with the likely experts
            read ahead; ``whole-layer`` streams every layer as prefill does.
        policy: which expert leaves a full cache.
        seed: which experts prefill leaves in the cache.
        predict: reads ahead for the exact path. ``auto`` is lookahead while it pays.
        hot_list: file with experts to keep besides the seed (see hot_list.py).
        prerouter: whether trained heads route. ``auto``: where the checkpoint was trained for it.
        prerouter_spec: file that stands for the checkpoint's own spec; its heads are beside it.
    """

    path: str = "auto"
    policy: str = DEFAULT_POLICY
    seed: str = DEFAULT_SEED_POLICY
    predict: str = "auto"
    hot_list: Path | None = None
    prerouter: str = "auto"
    prerouter_spec: Path | None = None

    @classmethod
    def of(cls, config: StreamConfig) -> DecodeOptions:
        """The decode part of a configuration; ``"auto"`` is the default of each.

        Raises:
            ConfigError: a name is unknown.
        """
        options = cls(
            path=config.decode_path,
            policy=DEFAULT_POLICY if config.cache_policy == "auto" else config.cache_policy,
            seed=DEFAULT_SEED_POLICY if config.seed_policy == "auto" else config.seed_policy,
            predict=config.predict,
            hot_list=None if config.hot_list is None else Path(config.hot_list),
            prerouter=config.prerouter,
            prerouter_spec=None if config.prerouter_spec is None else Path(config.prerouter_spec),
        )
        _one_of("decode path", PATHS, options.path)
        _one_of("cache policy", POLICIES, options.policy)
        _one_of("seed policy", SEED_POLICIES, options.seed)
        _one_of("prediction", PREDICTORS, options.predict)
        _one_of("Prerouter mode", PREROUTER_MODES, options.prerouter)
        return options


@dataclass(frozen=True)
class DecodePlan:
    """Which path decode takes.

    Attributes:
        path: ``"exact"``, ``"hot"``, ``"staged"``, ``"whole-layer"``; ``"adaptive"`` is exact until
            everything needed has been in memory for some tokens, then hot; ``"prerouted"`` is
            exact, with the routing of some layers predicted.
        reason: for people.
        stacked: whether cached experts lie in stacked slots.
    """

    path: str
    reason: str
    stacked: bool


def plan_decode(asked: str, *, on_device: bool, one_layout: bool) -> DecodePlan:
    """Choose a path.

    Args:
        asked: one of PATHS.
        on_device: reading a result back costs a sync with another processor.
        one_layout: all expert layers have the same record layout.
    """
    if asked != "auto":
        return DecodePlan(asked, "as asked", stacked=asked in ("hot", "staged"))
    if not on_device:
        return DecodePlan("exact", "the host computes: routing is there anyway", stacked=False)
    if not one_layout:
        return DecodePlan("exact", "layers differ in record layout", stacked=False)
    return DecodePlan("adaptive", "hot while nothing is missing", stacked=True)


def _one_of(what: str, names: tuple[str, ...], value: str) -> None:
    if value not in names:
        raise ConfigError(
            f"unknown {what}",
            expected=", ".join(names),
            actual=repr(value),
            remedy="choose one of them",
        )
