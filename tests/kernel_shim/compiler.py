"""Find a clang, compile a kernel with the runtime, keep the shared object by content.

clang 17 or newer: older ones lack bfloat16 arithmetic, other compilers lack address spaces that are
part of the type.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

RUNTIME = Path(__file__).parent / "runtime"
MIN_CLANG = 17
SOURCES = ("switch.cpp", "fibers.cpp", "scheduler.cpp", "collectives.cpp", "checker.cpp")
# Half and bfloat16 are rounded after every operation, as on a GPU; no fused multiply-add that the
# kernel did not write.
KERNEL_FLAGS = (
    *("-std=c++17", "-x", "c++", "-O1", "-w", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-Xclang", "-ffloat16-excess-precision=none"),
    *("-Xclang", "-fbfloat16-excess-precision=none"),
    *("-fno-exceptions", "-fno-rtti", "-ferror-limit=5", f"-I{RUNTIME}"),
)
METAL_FLAGS = ("-Xclang", "-cl-single-precision-constant")  # 1.0 is a float in Metal
CHECK_FLAGS = (
    "-fsanitize=thread",
    # To cc1 directly: ziglang's driver drops them. Recover: the handler reports and goes on.
    *("-Xclang", "-fsanitize=alignment,array-bounds,shift-exponent"),
    *("-Xclang", "-fsanitize-recover=alignment,array-bounds,shift-exponent"),
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write"),  # else `s[i] += x` counts as a write only
)
RUNTIME_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-c")


class CompileError(Exception):
    """The kernel is not valid; the message is the compiler's."""


@cache
def find_compiler() -> tuple[str, ...] | None:
    """Command of a clang++ that is new enough, or None. ``MLX_STREAM_SHIM_CXX`` overrides."""
    if named := os.environ.get("MLX_STREAM_SHIM_CXX"):
        return tuple(named.split())
    candidates = [f"clang++-{version}" for version in range(24, MIN_CLANG - 1, -1)] + ["clang++"]
    for name in candidates:
        if (path := shutil.which(name)) and _clang_version(path) >= MIN_CLANG:
            return (path,)
    if find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    return None


def _clang_version(path: str) -> int:
    text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"(?<!Apple )clang version (\d+)", text)
    return int(match[1]) if match else 0


@cache
def cache_folder() -> Path:
    """A private folder for shared objects: they are loaded as code, so nobody else may write."""
    if named := os.environ.get("MLX_STREAM_SHIM_CACHE"):
        folder = Path(named)
    else:
        folder = Path(tempfile.gettempdir()) / f"mlx_stream_kernel_shim_{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def type_check(cpp: str) -> None:
    """Compile the type build, syntax only, where a wrong address space is an error.

    Raises:
        CompileError: the kernel does not type-check.
    """
    key = _digest("types", cpp)
    passed = cache_folder() / f"{key}.types-ok"
    if passed.exists():
        return
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        text = Path(folder) / "kernel.cpp"
        text.write_text(cpp)
        flags = (*KERNEL_FLAGS, *METAL_FLAGS, "-DSHIM_TYPE_BUILD")
        # ziglang's driver expects an object from every compilation.
        only = ("-c", "-o", f"{text}.o") if "ziglang" in _compiler() else ("-fsyntax-only",)
        _run(*_compiler(), *flags, *only, str(text))
    passed.touch()


def load(cpp: str, *, metal: bool, check: bool) -> ctypes.CDLL:
    """The kernel with the runtime as a loaded library, from the cache if it was ever built.

    Raises:
        CompileError: the kernel does not compile.
    """
    key = _digest("check" if check else "fast", cpp)
    library = cache_folder() / f"{key}.so"
    if not library.exists():
        flags = (*KERNEL_FLAGS, *(METAL_FLAGS if metal else ()), *(CHECK_FLAGS if check else ()))
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            text, made, linked = (Path(folder) / f"kernel.{end}" for end in ("cpp", "o", "so"))
            text.write_text(cpp)
            _run(*_compiler(), *flags, "-c", str(text), "-o", str(made))
            objects = [str(path) for path in _runtime_objects()]
            _run(*_compiler(), "-shared", str(made), *objects, "-o", str(linked), "-lpthread")
            linked.replace(library)  # atomic: another process may build the same
    return _open(library)


@cache
def _open(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library))


@cache
def _runtime_objects() -> tuple[Path, ...]:
    return tuple(compile_runtime(name) for name in SOURCES)


def compile_runtime(name: str) -> Path:
    """Object file of one runtime source, from the cache if unchanged."""
    made = cache_folder() / f"{Path(name).stem}-{_digest('runtime', name)}.o"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            fresh = Path(folder) / "runtime.o"
            _run(*_compiler(), *RUNTIME_FLAGS, str(RUNTIME / name), "-o", str(fresh))
            fresh.replace(made)
    return made


@cache
def _environment_digest() -> str:
    """Changes whenever the compiler, a flag or a runtime file does."""
    parts = [" ".join(_compiler()), repr((KERNEL_FLAGS[:-1], METAL_FLAGS, CHECK_FLAGS))]
    parts.append(subprocess.run([*_compiler(), "--version"], capture_output=True, text=True).stdout)
    parts += [path.read_text() for path in sorted(RUNTIME.iterdir()) if path.is_file()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _digest(kind: str, text: str) -> str:
    whole = f"{kind}\0{_environment_digest()}\0{text}"
    return hashlib.sha256(whole.encode()).hexdigest()[:24]


def _compiler() -> tuple[str, ...]:
    command = find_compiler()
    if command is None:
        raise CompileError(f"no clang >= {MIN_CLANG} here; install clang-19 or the ziglang wheel")
    return command


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr[:6000])
