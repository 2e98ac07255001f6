"""The trainer's maths against independent code; needs torch, which CI does not have."""

# ruff: noqa: E402 -- what needs torch is imported after asking for it
import math

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs the extra 'train'")

from mlx_stream.errors import CapabilityError, CheckpointError
from mlx_stream.hub import demo_path
from mlx_stream.prerouter.router_maths import select as runtime_select
from mlx_stream.prerouter.spec import RouterMaths
from tests.prerouter.making import numpy_logits
from tools.prerouter_training.data import NEEDLE, Windows, without
from tools.prerouter_training.distill import reverse_kl
from tools.prerouter_training.generate import Writer
from tools.prerouter_training.heads import PARTS, Heads, head_features
from tools.prerouter_training.lora import Lora
from tools.prerouter_training.model import FrozenMix, Student, forward, routed_experts, select
from tools.prerouter_training.report import merged
from tools.prerouter_training.weights import assemble, dequantize, load_base
from tools.train_demo_model import Shape, expert_mix, init_weights

SHAPE = Shape(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=3,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)
CONSUMERS = (1, 2)


@pytest.fixture
def base():
    weights = {n: 4 * w if w.ndim > 1 else w for n, w in init_weights(SHAPE, 3).items()}
    return assemble(SHAPE, weights, torch.float32)


@pytest.fixture
def heads(base):
    """Heads whose every part matters."""
    found = Heads.warm_start(base, (0, 1), 16, 0)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in found.parameters.items():
        found.parameters[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
    return found


@pytest.fixture
def lora(base):
    found = Lora.fresh(base, 8.0, 4, 0)
    generator = torch.Generator().manual_seed(6)
    for name, tensor in found.parameters.items():
        if name.endswith("lora_B"):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return found


def tokens(rows=2, length=24):
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantization_is_mlxs(bits):
    w = mx.random.normal((3, 8, 128), key=mx.random.key(0))
    packed, scales, biases = mx.quantize(w, 64, bits)
    ours = dequantize(*(torch.from_numpy(np.array(a)) for a in (packed, scales, biases)), bits, 64)
    theirs = np.array(mx.dequantize(packed, scales, biases, 64, bits))
    assert np.abs(ours.numpy() - theirs).max() < 1e-6


def test_heads_are_the_numpy_reference(heads):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((1, 5, 64), np.float32))
    chosen = torch.from_numpy(rng.integers(0, 8, (1, 5, 2)))
    found = heads.logits(1, head_features(x, chosen, 8))[0].numpy()
    arrays = {(1, p): heads.parameters[f"layers.1.{p}.weight"].numpy() for p in PARTS}
    for t in range(5):
        previous = chosen[0, t - 1].tolist() if t else []
        # A multi-hot of a repeated expert has a two; the reference writes ones.
        if len(set(chosen[0, t].tolist())) < 2 or len(set(previous)) == 1:
            continue
        wanted = numpy_logits(arrays, 1, x[0, t].numpy(), chosen[0, t].tolist(), previous)
        assert np.abs(found[t] - wanted).max() < 1e-4


def test_selection_is_the_runtimes():
    logits = np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32)
    scores, chosen = select(torch.from_numpy(logits), 3)
    ids, weights = runtime_select(mx.array(logits), RouterMaths("softmax_topk"), 3)
    assert chosen.tolist() == np.array(ids).tolist()
    assert np.abs(scores.numpy() - np.array(weights)).max() < 1e-6


def test_without_heads_a_student_is_the_demo_models_twin(base):
    from tools.train_demo_model import forward as twin

    ids = tokens()
    wanted, _ = twin(base.weights, ids, SHAPE, torch.float32)
    assert (forward(Student(base, 2), ids) - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("feature", ["executed", "teacher"])
@pytest.mark.parametrize("prompt", [1, 9])
def test_one_parallel_pass_is_the_token_by_token_run(base, heads, lora, feature, prompt):
    student, ids = Student(base, 2, heads, CONSUMERS, feature, lora), tokens()
    writer = Writer(student, *ids.shape)
    steps = [writer.step(ids[:, n], predicted=n >= prompt) for n in range(ids.shape[1])]
    logits = forward(student, ids, predict_from=prompt) @ base.embedding.T
    assert (torch.stack(steps, dim=1) - logits).abs().max() < 1e-3
    plain = forward(Student(base, 2, lora=lora), ids) @ base.embedding.T
    assert (plain[:, :prompt] - logits[:, :prompt]).abs().max() < 1e-4
    assert (plain[:, prompt:] - logits[:, prompt:]).abs().max() > 1e-2


def test_gradients_of_frozen_experts_are_those_of_the_full_ones(base):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(20, 64, generator=generator, requires_grad=True)
    scores, chosen = select(torch.randn(20, 8, generator=generator), 2)
    scores = scores.detach().requires_grad_()
    weights = [
        base.weights[f"model.layers.0.mlp.switch_mlp.{n}_proj.weight"]
        for n in ("gate", "up", "down")
    ]
    for y in (
        FrozenMix.apply(x, scores, chosen, *base.experts[0]),
        expert_mix(x, scores, chosen, *weights),
    ):
        y.square().sum().backward()
    x2, s2 = x.grad / 2, scores.grad / 2  # both runs added up
    x.grad = scores.grad = None
    FrozenMix.apply(x, scores, chosen, *base.experts[0]).square().sum().backward()
    assert torch.allclose(x.grad, x2, rtol=1e-3, atol=1e-5)
    assert torch.allclose(scores.grad, s2, rtol=1e-3, atol=1e-5)


def test_runners_up_learn_as_if_they_took_part(base):
    """With all experts as runners-up: the output of the best two, the gradient of a softmax."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 20, 64, generator=generator)
    along = torch.randn(1, 20, 64, generator=generator)
    logits = torch.randn(1, 20, 8, generator=generator, requires_grad=True)
    y, chosen = routed_experts(x, logits, 2, base.experts[0], runners_up=6)
    plain, same = routed_experts(x, logits, 2, base.experts[0])
    assert torch.equal(y, plain)
    assert torch.equal(chosen, same)
    (y * along).sum().backward()
    gate_up, down = base.experts[0]
    g, u = (x[0] @ gate_up).chunk(2, dim=-1)  # [E, T, F]
    each = (torch.nn.functional.silu(g) * u) @ down
    wanted = logits.detach().requires_grad_()
    (torch.einsum("te,etd->td", wanted[0].softmax(dim=-1), each) * along[0]).sum().backward()
    assert torch.allclose(logits.grad, wanted.grad, rtol=1e-3, atol=1e-5)


def test_the_lora_is_what_the_unmerged_path_computes(base, lora):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    w = lora.effective("model.layers.1.", base.layer(1))["self_attn.q_proj.weight"]
    a, b = (lora.parameters[f"model.layers.1.self_attn.q_proj.lora_{s}"] for s in "AB")
    plain = x @ base.weights["model.layers.1.self_attn.q_proj.weight"].T
    assert torch.allclose(x @ w.T, plain + 2.0 * (x @ a.T) @ b.T, atol=1e-5)


def test_merging_rounds_again(base, lora):
    student = merged(Student(base, 2, lora=lora))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert student.lora is None
    assert len(student.base.weights[name][0].unique()) <= 16
    assert (
        student.base.weights["model.layers.0.mlp.gate.weight"]
        is base.weights["model.layers.0.mlp.gate.weight"]
    )


def test_reverse_kl_with_a_tail_is_the_numpy_reference():
    rng = np.random.default_rng(0)
    student, teacher = rng.standard_normal((2, 7, 50)) * 2
    total = 0.0
    for s, t in zip(student, teacher, strict=True):
        p, q = np.exp(s) / np.exp(s).sum(), np.exp(t) / np.exp(t).sum()
        best = np.argsort(-q)[:10]
        rest = [n for n in range(50) if n not in set(best)]
        total += sum(p[n] * math.log(p[n] / q[n]) for n in best)
        total += p[rest].sum() * math.log(p[rest].sum() / q[rest].sum())
    found = reverse_kl(torch.from_numpy(student), torch.from_numpy(teacher), 10)
    assert found.item() == pytest.approx(total / 7, rel=1e-6)
    assert reverse_kl(torch.from_numpy(teacher), torch.from_numpy(teacher), 10).item() < 1e-9


def test_windows_follow_from_seed_and_step():
    windows = Windows(torch.arange(1000), 10, 4, seed=3)
    assert torch.equal(windows.batch(7), Windows(torch.arange(1000), 10, 4, seed=3).batch(7))
    assert not torch.equal(windows.batch(7), Windows(torch.arange(1000), 10, 4, seed=4).batch(7))
    epoch = [windows.batch(s) for s in range(windows.steps_per_epoch)]
    starts = torch.cat(epoch)[:, 0].tolist()
    assert len(set(starts)) == len(starts)  # no window twice
    assert all(w.shape == (4, 11) for w in epoch)


def test_validation_has_nothing_of_the_excerpt():
    text = torch.randint(50, (400,), generator=torch.Generator().manual_seed(0))
    left = without(text, text[100 : 100 + 2 * NEEDLE])
    assert torch.equal(left, torch.cat((text[:100], text[100 + 2 * NEEDLE :])))


def test_other_checkpoints_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(CapabilityError, match="no torch twin"):
        load_base(tmp_path)
    from safetensors.torch import save_file

    save_file({"x.alpha": torch.zeros(2)}, tmp_path / "heads.safetensors")
    with pytest.raises(CheckpointError, match="no head"):
        Heads.load(tmp_path / "heads.safetensors")
    with pytest.raises(CheckpointError, match="expected form"):
        Lora.load(tmp_path / "heads.safetensors", 8.0, 4)


def test_the_demo_model_is_what_mlx_computes():
    from mlx_lm.utils import load_model

    base = load_base(demo_path())
    ids = torch.arange(40)[None] * 7 % 4096
    ours = (forward(Student(base, 4), ids) @ base.embedding.T)[0].numpy()
    model, _ = load_model(demo_path(), strict=True)
    theirs = np.array(model(mx.array(ids.numpy()))[0].astype(mx.float32))
    assert np.abs(ours - theirs).max() < 1e-2 * np.abs(theirs).max()
