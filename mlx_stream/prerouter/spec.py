"""What a checkpoint says about its Prerouter: which layers, which features, which router maths.

Pure data. Heads are trained for one way of feeding and using them; whoever runs them must do
exactly the same, so nothing here has a default that a checkpoint could forget to override:
:func:`read_spec` (spec_file.py) wants every field but those marked optional.
"""

from __future__ import annotations

from dataclasses import dataclass

FEATURES = ("executed", "teacher")
FIRST_PREDICTIONS = ("first_step", "second_step")
FIRST_PREVIOUS = ("zeros", "prompt")
MISSING_LINEAR = ("zeros", "error")
ROUTERS = ("softmax_topk", "sigmoid_group")


@dataclass(frozen=True)
class RouterMaths:
    """How a layer's logits ``[E]`` become K experts and their weights.

    Attributes:
        kind: ``softmax_topk`` (softmax, then the K largest) or ``sigmoid_group`` (sigmoid, then
            the K largest within the best groups, a group's score being the sum of its two best).
        norm: the weights are divided by their sum.
        scaling: they are multiplied by it, after that.
        n_group, topk_group: groups of experts, and how many of them stay; 1 and 1 for none.
        expert_bias: the layer's bias is added to the scores, for the selection only.
    """

    kind: str
    norm: bool = True
    scaling: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    expert_bias: bool = False


@dataclass(frozen=True)
class LoraSpec:
    """The Recovery LoRA that belongs to the heads; applied elsewhere.

    Attributes:
        file: in the folder of the spec.
        alpha, rank: the adapter's scale is alpha / rank.
    """

    file: str
    alpha: float
    rank: int

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class PrerouterSpec:
    """One checkpoint's Prerouter. Layers are numbered as in the model, dense ones included.

    The head of layer N at token t predicts layer N + 1 for token t + 1.

    Attributes:
        name: for people.
        trained: the heads, and the model with them, were trained to be used: ``--prerouter auto``
            turns them on.
        heads_file: in the folder of the spec.
        owners: layers that have a head.
        consumers: layers whose routing is the prediction; each one's owner is the layer before.
        top_k: experts a token in every layer, prefill included; None keeps the model's own.
        feature: the current token's experts that a head is fed. ``executed``: those that the
            owner layer used, predicted ones included; ``teacher``: those of its real router.
        first_prediction: the first decode step that uses predictions. ``second_step``: the first
            step uses the real router everywhere, and the heads run after it. ``first_step``: the
            heads run at the end of prefill, on the prompt's last position.
        first_previous: what stands for the previous token when the heads run first. ``prompt``:
            the position before that one in the prompt (zeros if the turn has none); ``zeros``.
        missing_linear_init: a head without this matrix has zeros there, or is refused.
        router: what the model's router must compute (checked when it is opened); None takes the
            model's word. Without `expert_bias` predictions are selected without the layer's bias.
        lora: the adapter trained with the heads, if any.
    """

    name: str
    trained: bool
    heads_file: str
    owners: tuple[int, ...]
    consumers: tuple[int, ...]
    top_k: int | None
    feature: str
    first_prediction: str
    first_previous: str
    missing_linear_init: str
    router: RouterMaths | None = None
    lora: LoraSpec | None = None

    @property
    def active_owners(self) -> tuple[int, ...]:
        """Owners of the heads that route something, in the order of :attr:`consumers`."""
        return tuple(layer - 1 for layer in self.consumers)


# The published forms; a folder without a spec is known by the name of its heads.
EDGE0_35B = PrerouterSpec(
    name="edge0_35b",
    trained=True,
    heads_file="prerouter_edge0_35b.safetensors",
    owners=tuple(range(6, 39)),
    consumers=tuple(range(7, 39)),
    top_k=4,
    feature="executed",
    first_prediction="second_step",
    first_previous="zeros",
    missing_linear_init="error",
    router=RouterMaths("softmax_topk"),
    lora=LoraSpec("lora_edge0_35b.safetensors", 32.0, 16),
)
EDGE0_8B = PrerouterSpec(
    name="edge0_8b",
    trained=True,
    heads_file="prerouter_edge0_8b.safetensors",
    owners=tuple(range(7, 23)),
    consumers=tuple(range(8, 24)),
    top_k=None,
    feature="teacher",
    first_prediction="first_step",
    first_previous="prompt",
    missing_linear_init="zeros",
    router=RouterMaths("sigmoid_group", scaling=2.5, n_group=8, topk_group=4),
    lora=LoraSpec("lora_edge0_8b.safetensors", 32.0, 16),
)
PUBLISHED = (EDGE0_35B, EDGE0_8B)
