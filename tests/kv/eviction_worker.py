"""A process that prefills a long prompt and decodes a little, for outside measurement.

``python -m tests.kv.eviction_worker JOB.json`` prints the receipt, the plan's figures and the
tokens as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mlx_stream.config import StreamConfig
from mlx_stream.engine import Engine
from mlx_stream.kv.options import PLAIN, KvOptions
from tests.prefill.running import decode
from tests.support.checkpoints import random_tokens


def main(path: str) -> None:
    """Run the job."""
    job = json.loads(Path(path).read_text())
    config = StreamConfig(
        memory_budget=job["budget"], chunk_tokens=job["chunk"], backend="cpu", union_tokens=0
    )
    engine = Engine(Path(job["model"]), config)
    kv = PLAIN if job["kv_dir"] is None else KvOptions(kv_evict="disk", kv_dir=job["kv_dir"])
    prompt = random_tokens(160, job["tokens"])
    result = engine.prefill(prompt, kv=kv)
    tokens = decode(engine, result, prompt, job["decode"])
    answer = {"receipt": result.receipt.as_dict(), "tokens": tokens}
    answer["kv_stored"] = engine.plan(job["tokens"], kv=kv).kv_stored
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
