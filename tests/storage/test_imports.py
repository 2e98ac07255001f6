"""The import rule for this folder: bytes only."""

import subprocess
import sys


def test_storage_does_not_import_mlx():
    code = (
        "import sys, pkgutil, importlib, mlx_stream.storage as s\n"
        "for m in pkgutil.iter_modules(s.__path__):\n"
        "    importlib.import_module(f'{s.__name__}.{m.name}')\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'torch')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
