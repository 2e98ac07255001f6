"""Runs the notebooks in a kernel of this Python, at low priority, in a folder of its own.

``python -m tests.notebooks.execute [NAME ...]`` refreshes the outputs that the files store.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
MAX_NBYTES = 300_000
CELL_SECONDS = 300
# An absolute path of two parts or more; not a URL, a unit or the end of a relative path.
MACHINE_PATH = re.compile(r"(?<![\w.:/<~-])/[\w.-]+/[\w.-]+|[A-Z]:\\")


def notebooks() -> list[Path]:
    """All notebooks, in reading order."""
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path, folder: Path) -> Any:
    """Run all cells in `folder`; returns the notebook with new outputs, the file is not touched.

    Raises:
        CellExecutionError: a cell raised.
    """
    import nbformat
    from jupyter_client.manager import KernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    manager = KernelManager(kernel_name="python3")
    spec = manager.kernel_spec
    assert spec is not None, "ipykernel brings a kernel for its own Python"
    nice = ["nice"] if shutil.which("nice") else []
    options = ["--HistoryManager.enabled=False", "--log-level=ERROR"]
    spec.argv = [
        *nice,
        sys.executable,
        *["-m", "ipykernel_launcher", "-f", "{connection_file}", *options],
    ]
    environment = os.environ | {
        "IPYTHONDIR": str(folder / ".ipython"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=CELL_SECONDS,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        return client.execute(env=environment)
    finally:
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)


def texts(notebook: Any) -> Iterator[str]:
    """Everything in a notebook that a reader sees as text: sources, then outputs."""
    for cell in notebook.cells:
        yield cell.source
    yield from output_texts(notebook)


def output_texts(notebook: Any) -> Iterator[str]:
    """The outputs that are text."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield "".join(output.get("text", ""))
            yield "\n".join(output.get("traceback", ()))
            for kind, data in output.get("data", {}).items():
                if kind.startswith("text/"):
                    yield "".join(data)


def tidy(notebook: Any) -> None:
    """Drop what differs from run to run and says nothing: times, versions of the kernel."""
    for cell in notebook.cells:
        cell.metadata = {k: v for k, v in cell.metadata.items() if k != "execution"}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def main(names: list[str]) -> None:
    """Execute and store."""
    import nbformat

    for path in notebooks():
        if names and path.name not in names and path.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        tidy(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
