"""The ordering rules of upload.py, each with the bug that breaks it.

The fake runtime copies as late as it may and poisons what it will copy to; MLX starts no work
before it must; slots are filled with rubbish as soon as their fence has passed. Under that
adversary a run that breaks a rule computes with wrong bytes every time.
"""

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.backends.cuda import upload as upload_module
from mlx_stream.backends.cuda.backend import CudaBackend
from mlx_stream.backends.cuda.computation import UploadFence
from mlx_stream.backends.cuda.upload import HostSlot, StreamUploader, compact, publish
from mlx_stream.experts.staging import StagingRing
from mlx_stream.storage.read_plan import GroupRead, Plane
from tests.prefill.running import decode, relative, settled_prompt

N, STEPS = 40, 4


class LazyMlx:
    """mlx.core whose async_eval does nothing, which is within its contract."""

    def __getattr__(self, name):
        return getattr(mx, name)

    @staticmethod
    def async_eval(*args):
        return None


class PoisonedFence:
    """Ruins the host slot as soon as the ring may believe that it is free."""

    def __init__(self, inner, buffer):
        self._inner, self._buffer = inner, buffer

    def passed(self):
        if self._inner.passed():
            self._buffer.array[:] = 0xFF
            return True
        return False

    def wait(self):
        self._inner.wait()
        self._buffer.array[:] = 0xFF


@pytest.fixture
def adversary(monkeypatch):
    """Lazy MLX, poisoned slots, two slots of one expert each."""
    monkeypatch.setattr("mlx_stream.backends.cuda.computation.mx", LazyMlx())
    monkeypatch.setattr("mlx_stream.planner.fit.TARGET_GROUP_NBYTES", 1)
    release, make = StagingRing.release, StagingRing.__init__
    monkeypatch.setattr(
        StagingRing,
        "release",
        lambda self, slot, fence: release(self, slot, PoisonedFence(fence, slot.buffer)),
    )
    monkeypatch.setattr(
        StagingRing,
        "__init__",
        lambda self, backend, reader, nbytes, _: make(self, backend, reader, nbytes, 2),
    )


def wrong(path, stock, open_cuda) -> bool:
    """Whether prefill or decode differs from stock."""
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_cuda(path)
    assert engine.plan(N).group_size == 1
    result = engine.prefill(prompt)
    if not relative(result.logits, rows[0]) < 1e-5:
        return True
    engine.decoder.cache.resize(2)  # decode must read most experts, into slots that others used
    return decode(engine, result, prompt, STEPS) != [int(row.argmax()) for row in rows]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4"])
def test_correct_under_the_adversary(checkpoint, stock, open_cuda, fake, adversary, name):
    assert not wrong(checkpoint(name), stock, open_cuda)
    assert not fake.misuse


def test_rule_1_copying_when_published_is_caught(
    checkpoint, stock, open_cuda, adversary, monkeypatch
):
    """Decode publishes a record before its bytes have arrived."""

    def eager(self, mlp, read, buffer):
        published = CudaBackend_publish(self, mlp, read, buffer)
        published.weights.start(self._uploader)
        published.weights.planes()
        return published

    CudaBackend_publish = CudaBackend.publish
    monkeypatch.setattr(CudaBackend, "publish", eager)
    assert wrong(checkpoint("qwen3_moe"), stock, open_cuda)


def test_rule_2_reading_before_the_event_is_caught(
    checkpoint, stock, open_cuda, adversary, monkeypatch
):
    monkeypatch.setattr(upload_module.DeviceGroup, "planes", lambda self: self._planes)
    assert wrong(checkpoint("qwen3_moe"), stock, open_cuda)


def test_rule_3_overwriting_before_readers_are_done_is_caught(
    checkpoint, stock, open_cuda, adversary, monkeypatch
):
    monkeypatch.setattr(HostSlot, "wait_for_readers", lambda self: self.markers.clear())
    assert wrong(checkpoint("qwen3_moe"), stock, open_cuda)


def test_rule_3_a_marker_of_too_little_is_caught(
    checkpoint, stock, open_cuda, adversary, monkeypatch
):
    """A marker that does not depend on what was computed from the mirror."""
    read_by = HostSlot.read_by
    monkeypatch.setattr(HostSlot, "read_by", lambda self, _: read_by(self, mx.zeros((1,))))
    assert wrong(checkpoint("qwen3_moe"), stock, open_cuda)


def test_rule_4_a_fence_that_passes_too_early_is_caught(
    checkpoint, stock, open_cuda, adversary, monkeypatch
):
    """With the host's own wait left out, only the fence keeps readers from refilling the slot."""

    class Deferred(upload_module.DeviceGroup):
        """Waits when MLX evaluates, not before: the fence is then what orders the refill."""

    fences = []
    monkeypatch.setattr(UploadFence, "passed", lambda self: True)
    monkeypatch.setattr(UploadFence, "wait", lambda self: fences.append(self))
    monkeypatch.setattr(Deferred, "planes", lambda self: self._planes)
    monkeypatch.setattr(upload_module, "DeviceGroup", Deferred)
    assert wrong(checkpoint("qwen3_moe"), stock, open_cuda)


def one_plane(values: np.ndarray) -> tuple[GroupRead, np.ndarray]:
    """A group of two experts with one uint8 tensor each, and its slot's bytes."""
    n = values.size // 2
    plane = Plane(("up_proj", "weight"), "U8", (n,), n, (0, n))
    return GroupRead(0, (3, 4), (plane,), (), values.size, values.size, 0), values


@pytest.fixture
def slot(fake):
    """A filled host slot of pinned memory and its uploader."""
    backend = CudaBackend(require_device=False, cudart=fake)
    buffer = backend.allocate(4096, 1)
    buffer.array[:] = np.arange(4096) % 251
    yield buffer.owner, backend._uploader
    backend.close()


def test_rule_4_the_fence_is_the_event_of_the_copy(fake, slot):
    """Not passed while the copy is pending; a slot refilled before would be copied refilled."""
    host, uploader = slot
    read, _ = one_plane(host.memory)
    group = publish(read, host)
    fence = UploadFence([group.start(uploader)])
    assert not fence.passed()
    assert fake.copied_nbytes == 0
    expected = host.memory.copy()
    fence.wait()
    assert fence.passed()
    host.memory[:] = 0
    assert (np.array(group.planes()["up_proj", "weight"]).reshape(-1) == expected).all()


def test_rule_5_a_group_of_an_earlier_publication_is_refused(slot):
    host, uploader = slot
    read, _ = one_plane(host.memory)
    old = publish(read, host)
    publish(read, host)
    with pytest.raises(AssertionError, match="moved on"):
        old.start(uploader)


@pytest.mark.parametrize("broken", [False, True])
def test_rule_6_pinned_memory_outlives_its_copies(fake, monkeypatch, broken):
    if broken:
        monkeypatch.setattr(StreamUploader, "idle", lambda self: None)
    backend = CudaBackend(require_device=False, cudart=fake)
    buffer = backend.allocate(4096, 1)
    read, _ = one_plane(buffer.array)
    publish(read, buffer.owner).start(backend._uploader)
    backend.free(buffer)
    backend.close()
    assert bool(fake.misuse) == broken


def test_an_uploaded_group_is_not_copied_again(fake, slot):
    """A cache hit costs no bus transfer."""
    host, uploader = slot
    read, _ = one_plane(host.memory)
    group = publish(read, host)
    group.start(uploader)
    group.planes()
    copies = fake.calls.count("memcpy_async")
    assert group.start(uploader) is None
    assert fake.calls.count("memcpy_async") == copies


def test_events_are_reused(fake, slot):
    host, uploader = slot
    read, _ = one_plane(host.memory)
    for _ in range(5):
        group = publish(read, host)
        group.start(uploader)
        group.planes()
    assert fake.calls.count("event_create") == 1


def test_scattered_experts_become_gapless_planes():
    planes = (
        Plane(("up_proj", "weight"), "U32", (2, 4), 32, (100, 200, 232)),
        Plane(("up_proj", "scales"), "F16", (3,), 6, (7, 13, 19)),
    )
    dense, runs, nbytes = compact(GroupRead(0, (1, 5, 6), planes, (), 4096, 114, 0))
    assert [(r.source, r.target, r.nbytes) for r in runs] == [
        (100, 0, 32),
        (200, 32, 64),
        (7, 256, 18),
    ]
    assert all(plane.contiguous for plane in dense.planes)
    assert nbytes == 512


def test_a_slot_keeps_few_markers():
    host = HostSlot(np.zeros(8, np.uint8))
    for i in range(100):
        host.read_by(mx.array(i))
    assert len(host.markers) <= upload_module.MAX_MARKERS
    host.wait_for_readers()
    assert not host.markers
