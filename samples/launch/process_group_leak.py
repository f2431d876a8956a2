"""The group is made, used and forgotten.

run: --nproc-per-node 2
finds: DDP105 note at `dist.init_process_group("gloo")`
"""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"{total.item():.0f} ranks are here")


if __name__ == "__main__":
    main()
