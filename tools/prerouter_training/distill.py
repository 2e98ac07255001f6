"""Losses of the LoRA's phases: cross-entropy on text, and reverse KL against the teacher."""

from __future__ import annotations

import torch
from torch.nn import functional as fn

from tools.prerouter_training.model import Student, forward


def text_loss(
    student: Student,
    windows: torch.Tensor,
    predict_from: int,
    teacher: Student | None = None,
    soft: float = 0.0,
) -> torch.Tensor:
    """Mean cross-entropy of ``windows [B, T + 1]`` on the student's path.

    Args:
        teacher: its distributions are labels too, with weight `soft`; the text's tokens have the
            rest. Soft labels say more about a token than the one that happened to follow.
    """
    h = forward(student, windows[:, :-1], predict_from=predict_from)
    logits = _logits(student, h)
    hard = fn.cross_entropy(logits, windows[:, 1:].flatten())
    if teacher is None:
        return hard
    with torch.no_grad():
        labels = _logits(teacher, forward(teacher, windows[:, :-1])).softmax(dim=-1)
    return (1 - soft) * hard + soft * fn.cross_entropy(logits, labels)


def distillation_loss(
    student: Student, teacher: Student, ids: torch.Tensor, prompt: int, top: int
) -> torch.Tensor:
    """Reverse KL over the tokens that the student wrote.

    Args:
        ids: ``[B, P + N]``, P prompt tokens and N that the student wrote after them.
        top: tokens of the teacher's distribution that are compared one by one.
    """
    written = slice(prompt - 1, ids.shape[1] - 1)  # positions whose next token was written
    with torch.no_grad():
        taught = _logits(teacher, forward(teacher, ids)[:, written])
    h = forward(student, ids, predict_from=prompt)[:, written]
    return reverse_kl(_logits(student, h), taught, top)


def reverse_kl(student: torch.Tensor, teacher: torch.Tensor, top: int) -> torch.Tensor:
    """Mean KL(student || teacher) over the teacher's `top` tokens and the rest as one event.

    Args:
        student, teacher: logits ``[N, V]``, `top` < V.
    """
    log_p, log_q = student.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
    best = log_q.topk(top, dim=-1).indices
    near_p, near_q = log_p.gather(1, best), log_q.gather(1, best)
    tail_p, tail_q = (_tail(log, best) for log in (log_p, log_q))
    head = (near_p.exp() * (near_p - near_q)).sum(dim=-1)
    return (head + tail_p.exp() * (tail_p - tail_q)).mean()


def _tail(log: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Log of the mass outside `best`: ``[N, V], [N, top] -> [N]``."""
    return log.scatter(1, best, float("-inf")).logsumexp(dim=-1)


def _logits(student: Student, h: torch.Tensor) -> torch.Tensor:
    """``[B, T, D] -> [B T, V]`` float32."""
    return (h.flatten(0, 1).to(student.base.dtype) @ student.base.embedding.T).float()
