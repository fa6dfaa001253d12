"""``torchrun --nproc-per-node N script``, whose ranks are forked: each would import torch again."""

from __future__ import annotations

import os
import runpy
import socket
import sys


def main(count: int, script: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(count))
    for rank in range(count):
        if os.fork() == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            sys.argv = [script]
            runpy.run_path(script, run_name="__main__")
            return  # and ends as a program does
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(count)]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main(int(sys.argv[2]), sys.argv[3])
