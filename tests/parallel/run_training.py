"""Started by torchrun: FOLDER DIMENSION UNTIL [KILLED_AT]; rank 0 prints what it computed."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from cases_of_training import continued

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, dimension, until, *killed = sys.argv[1:]
    found = continued(folder, dimension, int(until), int(killed[0]) if killed else None)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
