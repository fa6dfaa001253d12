"""``torchrun --nproc-per-node N script``, whose ranks are forked: each would import torch again."""

from __future__ import annotations

import os
import runpy
import sys

import torch.distributed as dist

_DIGITS = 5


def main(count: int, script: str) -> None:
    """Serves the ranks' store, as torchrun does: a port that a rank took later could be gone."""
    port, tell = os.pipe()
    for rank in range(count):
        if os.fork() == 0:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.read(port, _DIGITS).decode())
            os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
            sys.argv = [script]
            runpy.run_path(script, run_name="__main__")
            return  # and ends as a program does
    # After the forks: it has a thread.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tell, f"{store.port:0{_DIGITS}}".encode() * count)
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(count)]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main(int(sys.argv[2]), sys.argv[3])
