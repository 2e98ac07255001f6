"""The runtime builds for the machines it claims, without warnings; the compiler cache."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from . import compiler, find_compiler, needs_clang, run_on_cpu
from .compiler import RUNTIME, RUNTIME_FLAGS, SOURCES
from .support import inline_kernel, launch

pytestmark = needs_clang
BODY = "y[thread_position_in_grid.x] = x[thread_position_in_grid.x] + 1;"
X = np.arange(64, dtype=np.float32)


def compile_for(target: str, made) -> bytes:
    command = [*find_compiler(), f"--target={target}", "-c", str(RUNTIME / "switch.cpp")]
    subprocess.run([*command, "-o", str(made)], check=True, capture_output=True)
    return made.read_bytes()


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 62), ("aarch64", 183)])
def test_the_context_switch_assembles_for(machine, number, tmp_path):
    made = compile_for(f"{machine}-linux-gnu", tmp_path / "switch.o")
    assert int.from_bytes(made[18:20], "little") == number  # e_machine of the ELF header
    assert b"shim_switch" in made


def test_the_runtime_compiles_without_warnings(tmp_path):
    for name in SOURCES:
        command = [*find_compiler(), *RUNTIME_FLAGS, "-Werror", "-fsyntax-only"]
        done = subprocess.run([*command, str(RUNTIME / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_shared_object_is_built_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_STREAM_SHIM_CACHE", str(tmp_path))
    for cached in (compiler.cache_folder, compiler._runtime_objects, compiler._open):
        cached.cache_clear()
    commands = []
    run = compiler._run
    monkeypatch.setattr(
        compiler, "_run", lambda *command: (commands.append(command), run(*command))
    )
    try:
        where = launch(64, [((64,), "float32")])
        for _ in range(2):
            (y,), _ = run_on_cpu(inline_kernel(BODY), where, [X])
            np.testing.assert_array_equal(y, X + 1)
        assert len(commands) == len(SOURCES) + 3  # runtime, type build, kernel, link
        run_on_cpu(inline_kernel(BODY + " "), where, [X])
        assert len(commands) == len(SOURCES) + 6  # another text; the runtime is kept
    finally:
        for cached in (compiler.cache_folder, compiler._runtime_objects, compiler._open):
            cached.cache_clear()


def test_the_key_tells_builds_and_texts_apart():
    first = compiler._digest("check", "text")
    assert first != compiler._digest("fast", "text")
    assert first != compiler._digest("check", "text ")


def test_many_threads_may_launch_one_kernel():
    where = launch(64, [((64,), "float32")])
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda k: run_on_cpu(inline_kernel(BODY), where, [X + k])[0][0], range(8))
        )
    for k, y in enumerate(results):
        np.testing.assert_array_equal(y, X + k + 1)
