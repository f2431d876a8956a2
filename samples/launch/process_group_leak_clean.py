"""The group is destroyed also where the work in between fails.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"{total.item():.0f} ranks are here")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
