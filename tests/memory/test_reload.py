"""Loading again and again leaves nothing behind, not even in MLX's random state."""

import subprocess
import sys

WARM, ROUNDS = 16, 30
MOST_NBYTES = 5_000_000  # the chain of random draws alone is 6 MB

SCRIPT = f"""
import gc, psutil
from mlx_stream.config import StreamConfig
from mlx_stream.engine import Engine
from mlx_stream.hub import demo_path

def come_and_go(times):
    for _ in range(times):
        Engine(demo_path(), StreamConfig(memory_budget=200_000_000, backend="cpu")).close()
    gc.collect()
    return psutil.Process().memory_info().rss

before = come_and_go({WARM})
print(come_and_go({ROUNDS}) - before)
"""


def test_engines_that_come_and_go():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    grown = int(run.stdout)
    print(f"grown by {grown / 1e6:.1f} MB in {ROUNDS} loads")
    assert grown < MOST_NBYTES
