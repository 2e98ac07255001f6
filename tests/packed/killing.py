"""``python -m tests.packed.killing SOURCE TARGET``: packs slowly, in small pieces, to be killed."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from mlx_stream.errors import MlxStreamError
from mlx_stream.packed.pack import PackOptions, pack
from mlx_stream.storage.record_layout import RECORD_ALIGN

PAUSE = 0.002


def main(source: str, target: str, verify: str = "") -> None:
    options = PackOptions(shard_nbytes=1, piece_nbytes=2 * RECORD_ALIGN, verify=bool(verify))
    try:
        print("ready", flush=True)  # an interrupt may come at once
        report = pack(Path(source), Path(target), options, lambda *_: time.sleep(PAUSE))
        print(f"packed, kept {report.kept_nbytes}")
    except MlxStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what comes now finds nothing to interrupt


if __name__ == "__main__":
    main(*sys.argv[1:])
