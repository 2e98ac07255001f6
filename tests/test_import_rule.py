"""The tree's rules, read from the source: imports go down only, files stay short, all is typed."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mlx_stream

ROOT = Path(mlx_stream.__file__).parent
FILES = {
    ".".join(("mlx_stream", *path.relative_to(ROOT).with_suffix("").parts)): path
    for path in sorted(ROOT.rglob("*.py"))
}
MAX_LINES = 320

# Who may import whom, by package or top-level module; each may also import itself.
BOTTOM = {"errors"}
BASE = {"errors", "interrupts", "config", "budget", "telemetry", "timeline", "whole_files"}
STORAGE = BASE | {"storage"}
BACKENDS = STORAGE | {"backends"}
EXPERTS = BACKENDS | {"experts"}
SIBLINGS = EXPERTS
PLANNER = {"errors", "config", "whole_files", "storage", "hub", "prefill.schedule", "kv.options"}
KV = SIBLINGS | {"prefill.cache_views", "prefill.hooks", "prefill.schedule"}
RUNTIME = EXPERTS | {"prefill", "decode", "kv", "planner", "loader", "hub", "prompts", "resume"}
RUNTIME |= {"prerouter", "adapters"}
FLAGS = {"click_options", "sampling", "decode_flags", "kv_flags", "keep_flags"}
COMMANDS = {
    "bench",
    "generate",
    "chat",
    "cache_prompt",
    "doctor",
    "trace_command",
    "plan_command",
    "probe_command",
    "pack_command",
    "cli",
}
TOP = RUNTIME | FLAGS | COMMANDS | {"engine", "runtime", "terminal"}
ALLOWED = {
    "errors": set(),
    "interrupts": set(),
    "config": BOTTOM,
    "budget": BOTTOM | {"config"},
    "telemetry": BOTTOM | {"config", "whole_files"},
    "whole_files": set(),
    "click_options": set(),
    "timeline": {"whole_files"},
    "storage": BASE,
    "hub": BOTTOM | {"config"},
    "prompts": BOTTOM | {"config"},
    "backends": STORAGE,
    "experts": BACKENDS,
    "prefill": SIBLINGS,
    "adapters": EXPERTS,
    "prerouter": EXPERTS,
    "decode": SIBLINGS | {"prerouter"},
    "kv": KV,
    "planner": PLANNER,
    "packed": STORAGE,
    "convert": EXPERTS | {"packed", "packed_model", "lazy_model"},
    "lazy_model": BOTTOM,
    "packed_model": EXPERTS,
    "loader": EXPERTS | {"planner", "packed_model", "lazy_model"},
    "allotment": RUNTIME,
    "decoding": RUNTIME | {"allotment"},
    "resume": KV | {"prefill", "kv"},
    "run_hooks": RUNTIME,
    "plan_runner": RUNTIME | {"run_hooks"},
    "drafting": RUNTIME,
    "prerouting": RUNTIME,
    "adapting": RUNTIME,
    "prompt_plans": RUNTIME,
    "engine": RUNTIME
    | {"allotment", "decoding", "drafting", "plan_runner", "prerouting", "adapting"}
    | {"prompt_plans"},
    "prompt_caches": RUNTIME | {"engine", "run_hooks", "adapting"},
    "conversation": RUNTIME | {"engine", "prompt_caches", "adapting"},
    "responses": RUNTIME | {"engine"},
    "runtime": RUNTIME | {"engine", "prompt_caches", "conversation", "adapting", "responses"},
    "sampling": BASE | {"click_options"},
    "decode_flags": BASE
    | {"click_options", "decode.options", "decode.policy", "decode.seed_policy"},
    "terminal": BASE | {"prefill.schedule"},
    "keep_flags": BASE | {"click_options", "kv.options", "resume.options"},
    "kv_flags": RUNTIME | {"click_options", "engine", "runtime", "decode_flags"},
    "continuation": RUNTIME | {"engine", "runtime"},
    "bench": TOP | {""},
    "plan_command": TOP,
    "generate": TOP | {"continuation"},
    "chat": TOP | {"conversation"},
    "cache_prompt": TOP | {"continuation"},
    "doctor": TOP,
    "trace_command": TOP,
    "pack_command": TOP | {"packed", "convert"},
    "probe_arms": BASE | {"planner"},
    "block_probe": EXPERTS | {"planner", "probe_arms"},
    "compute_probe": EXPERTS | {"planner", "probe_arms", "block_probe"},
    "overlap_probe": EXPERTS | {"probe_arms", "compute_probe"},
    "probe_command": TOP | {"compute_probe", "overlap_probe"},
    "cli": TOP | {""},
    "__main__": TOP,
    "": set(),  # mlx_stream/__init__.py: lazy exports only
}
NEVER_MLX = (
    "storage",
    "packed",
    "errors",
    "interrupts",
    "config",
    "budget",
    "telemetry",
    "timeline",
    "hub",
    "planner",
    "",
)


def layer_of(module: str) -> str:
    """``mlx_stream.prefill.schedule -> prefill``; the package itself is the empty string."""
    parts = module.split(".")[1:]
    return parts[0] if parts and parts[0] != "__init__" else ""


def imported(module: str, path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, at any depth of its code."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    if path.name == "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES or is_package(name) else base for name in names}
    return found


def is_package(name: str) -> bool:
    return f"{name}.__init__" in FILES


def violations(module: str, names: set[str]) -> list[str]:
    layer = layer_of(module)
    assert layer in ALLOWED, f"{module}: say in ALLOWED what the new layer may import"
    bad = []
    for name in sorted(names):
        top = name.split(".")[0]
        if layer in NEVER_MLX and top in ("mlx", "mlx_lm"):
            bad.append(f"{module} imports {name}")
        if top != "mlx_stream" or layer_of(name) == layer:
            continue
        below = name.removeprefix("mlx_stream").lstrip(".")
        if not any(
            below == allowed or (allowed and below.startswith(allowed + "."))
            for allowed in ALLOWED[layer]
        ):
            bad.append(f"{module} imports {name}")
    return bad


def test_imports_go_down_only():
    bad = [
        text
        for module, path in FILES.items()
        for text in violations(module, imported(module, path))
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("mlx_stream.storage.reader", "import mlx.core as mx"),
        ("mlx_stream.storage.reader", "def f():\n    from mlx_stream.backends import base"),
        ("mlx_stream.prefill.rendezvous", "from ..decode.loop import decode_tokens"),
        ("mlx_stream.prefill.rendezvous", "from .. import decode"),
        ("mlx_stream.decode.loop", "from mlx_stream.prefill.schedule import Segment"),
        ("mlx_stream.experts.staging", "import mlx_stream.prefill.layer_major"),
        ("mlx_stream.planner.fit", "from mlx_stream.prefill.layer_major import LayerMajorPrefill"),
        ("mlx_stream.backends.base", "from mlx_stream.planner import fit"),
        ("mlx_stream.engine", "from mlx_stream.cli import cli"),
        ("mlx_stream.config", "from . import storage"),
    ],
)
def test_the_rule_sees_what_it_forbids(tmp_path, module, code):
    path = tmp_path / "module.py"
    path.write_text(code)
    assert violations(module, imported(module, path))


def test_the_rule_allows_what_it_should(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("from ..storage import reader\nfrom mlx_stream.experts.staging import Slot\n")
    assert not violations("mlx_stream.prefill.layer_major", imported("mlx_stream.prefill.x", path))


@pytest.mark.parametrize("name", ["mlx_stream", "mlx_stream.planner.plan", "mlx_stream.errors"])
def test_import_stays_free_of_mlx(name):
    code = (
        f"import sys, {name}\n"
        "assert not {'mlx', 'mlx_lm', 'transformers', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", FILES)
def test_files_stay_short(module):
    assert len(FILES[module].read_text().splitlines()) <= MAX_LINES


def public_definitions(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    """Public functions and classes of a module, and the public methods of its public classes."""
    found: list[tuple[str, ast.AST]] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found.append((node.name, node))
            if isinstance(node, ast.ClassDef):
                found += [
                    (f"{node.name}.{part.name}", part)
                    for part in node.body
                    if isinstance(part, ast.FunctionDef) and not part.name.startswith("_")
                ]
    return found


def is_property(node: ast.FunctionDef) -> bool:
    names = {getattr(d, "id", getattr(d, "attr", None)) for d in node.decorator_list}
    return bool(names & {"property", "cached_property", "setter"})


def unannotated(node: ast.FunctionDef) -> list[str]:
    a = node.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    missing = [x.arg for x in every if x.annotation is None and x.arg not in ("self", "cls")]
    return missing + ([] if node.returns is not None else ["return"])


@pytest.mark.parametrize("module", FILES)
def test_the_public_surface_is_documented_and_annotated(module):
    tree = ast.parse(FILES[module].read_text())
    if tree.body and FILES[module].name != "__main__.py":
        assert ast.get_docstring(tree), f"{module} does not say what it owns"
    for name, node in public_definitions(tree):
        if isinstance(node, ast.FunctionDef):
            assert not unannotated(node), f"{module}: {name} lacks {unannotated(node)}"
            if is_property(node):
                continue  # its name and type may say it all
        assert ast.get_docstring(node), f"{module}: {name} has no docstring"


def test_every_package_is_installed():
    """Editable installs work without; wheels would lack the folder."""
    listed = set(
        tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"][
            "packages"
        ]
    )
    found = {name.removesuffix(".__init__") for name in FILES if name.endswith(".__init__")}
    assert found <= listed
