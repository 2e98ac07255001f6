"""The loop of all phases: optimizer, schedule, held-out score, early stop, checkpoints, resume.

A run's loss curve depends on its settings alone. Data and random numbers are drawn from the seed
and the step, so a checkpoint holds parameters, optimizer, step and curve, and a run that was
killed goes on as if it had not been.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mlx_stream.errors import MlxStreamError
from tools.prerouter_training.schedule import Schedule

STATE, CURVE = "state.pt", "curve.jsonl"


class Loop:
    """One run in one folder.

    Args:
        out: folder of the checkpoint and the curve.
        parameters: trained in place.
        slower: names of those that learn at a part of the rate, and that part.
        settings: all that the curve depends on; a checkpoint of other settings is refused.
        resume: go on from the folder's checkpoint, if there is one.

    Attributes:
        curve: one row a step (``step``, ``loss``, ...) or a score (``step``, ``perplexity``, ...).
        best: parameters of the best score.
        best_score: its held-out perplexity.
    """

    def __init__(
        self,
        out: Path,
        parameters: Mapping[str, torch.Tensor],
        schedule: Schedule,
        settings: dict[str, Any],
        *,
        resume: bool,
        slower: tuple[frozenset[str], float] = (frozenset(), 1.0),
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.parameters, self.schedule = out, dict(parameters), schedule
        self.settings = settings | {"schedule": asdict(schedule)}
        for tensor in self.parameters.values():
            tensor.requires_grad_()
        names, self._part = slower
        groups = [
            {"params": [t for n, t in self.parameters.items() if (n in names) == slow]}
            for slow in (False, True)
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=schedule.peak_lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.step, self.seconds, self.stale = 0, 0.0, 0
        self.curve: list[dict[str, float]] = []
        self.best, self.best_score = self._copy(), math.inf
        if resume and (out / STATE).exists():
            self._load()

    def run(
        self,
        loss_of: Callable[[int], tuple[torch.Tensor, dict[str, float]]],
        score: Callable[[], dict[str, float]],
    ) -> None:
        """Train until the steps are used up or the score has not improved for long.

        Args:
            loss_of: the loss of a step, and what else to note of it.
            score: held-out numbers, ``perplexity`` among them.
        """
        if not self.curve:
            self._score(score)
        while self.step < self.schedule.steps and self.stale < self.schedule.patience:
            began = time.monotonic()
            loss, notes = loss_of(self.step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
            for group, part in zip(self._optimizer.param_groups, (1.0, self._part), strict=True):
                group["lr"] = part * self.schedule.rate(self.step)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.step += 1
            self.curve.append({"step": self.step, "loss": loss.item()} | notes)
            if self.step % self.schedule.eval_every == 0 or self.step == self.schedule.steps:
                self._score(score)
            self.seconds += time.monotonic() - began
            if self.step % self.schedule.save_every == 0:
                self._progress()
                self.save()
        self.save()

    def save(self) -> None:
        """Replace the checkpoint and the curve, each at once."""
        state = {
            "parameters": {n: t.detach() for n, t in self.parameters.items()},
            "optimizer": self._optimizer.state_dict(),
            "best": self.best,
            "rest": (self.step, self.seconds, self.stale, self.best_score),
            "curve": self.curve,
            "settings": self.settings,
        }
        torch.save(state, self.out / f"{STATE}.new")
        os.replace(self.out / f"{STATE}.new", self.out / STATE)
        rows = "".join(json.dumps(row) + "\n" for row in self.curve)
        (self.out / f"{CURVE}.new").write_text(rows)
        os.replace(self.out / f"{CURVE}.new", self.out / CURVE)

    def _load(self) -> None:
        state = torch.load(self.out / STATE, weights_only=True)
        if state["settings"] != self.settings:
            raise MlxStreamError(
                "the checkpoint is of a run with other settings",
                file=self.out / STATE,
                expected=self.settings,
                actual=state["settings"],
                remedy="resume with the same options, or train into an empty folder",
            )
        with torch.no_grad():
            for name, tensor in self.parameters.items():
                tensor.copy_(state["parameters"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.stale, self.best_score = state["rest"]
        self.best, self.curve = state["best"], state["curve"]

    def _copy(self) -> dict[str, torch.Tensor]:
        return {n: t.detach().clone() for n, t in self.parameters.items()}

    def _score(self, score: Callable[[], dict[str, float]]) -> None:
        with torch.no_grad():
            found = score()
        self.stale += 1
        if found["perplexity"] < self.best_score:
            self.best, self.best_score, self.stale = self._copy(), found["perplexity"], 0
        self.curve.append({"step": self.step} | found)
        print(f"step {self.step}: held-out {json.dumps(found)}", flush=True)

    def _progress(self) -> None:
        losses = [row["loss"] for row in self.curve if "loss" in row][-self.schedule.save_every :]
        print(
            f"step {self.step} of {self.schedule.steps}, {self.seconds:.0f} s, "
            f"loss {sum(losses) / len(losses):.4f}",
            flush=True,
        )
