"""Rank 0 catches an error and leaves a function; the others wait in it for its answer.

run: --nproc-per-node 2
finds: DDP601 error at `if not all_true(data is not None):`
"""

import torch
import torch.distributed as dist


def all_true(value):
    answer = torch.tensor(int(value))
    dist.all_reduce(answer, op=dist.ReduceOp.MIN)
    return bool(answer)


def download(name):
    raise ConnectionError(f"cannot reach the server of {name}")


def load(name):
    data = name
    if dist.get_rank() == 0:
        try:
            data = download(name)
        except ConnectionError as error:
            print(f"offline: {error}", flush=True)
            return None
    if not all_true(data is not None):
        return None
    return data


def main():
    dist.init_process_group("gloo")
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, load("corpus"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
