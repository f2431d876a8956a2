"""A script in the style of timm: mixup, averaged weights, BatchNorm statistics reduced per epoch.

run: --nproc-per-node 2
finds: nothing
steps: 16
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--mixup", type=float, default=0.2)
parser.add_argument("--model-ema-decay", type=float, default=0.9)
parser.add_argument("--num-classes", type=int, default=4)
parser.add_argument("--output", default="output")


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema, new in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema.copy_(self.decay * ema + (1 - self.decay) * new)


class CheckpointSaver:
    def __init__(self, folder):
        os.makedirs(folder, exist_ok=True)
        self.folder, self.best = folder, None

    def save(self, model, ema, optimizer, epoch, metric):
        weights = {"state_dict": model.module.state_dict(), "ema": ema.module.state_dict()}
        state = {"epoch": epoch, "optimizer": optimizer.state_dict(), **weights}
        torch.save(state, os.path.join(self.folder, "last.pth.tar"))
        if self.best is None or metric > self.best:
            self.best = metric
            torch.save(state, os.path.join(self.folder, "model_best.pth.tar"))


def reduce_tensor(tensor, n):
    reduced = tensor.clone()
    dist.all_reduce(reduced, op=dist.ReduceOp.SUM)
    return reduced / n


def distribute_bn(model, world_size):
    for name, buffer in model.named_buffers():
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
            buffer /= float(world_size)


def mixup(x, target, args):
    one_hot = F.one_hot(target, args.num_classes).float()
    lam = torch.distributions.Beta(args.mixup, args.mixup).sample().item()
    return x * lam + x.flip(0) * (1 - lam), one_hot * lam + one_hot.flip(0) * (1 - lam)


def train_one_epoch(model, loader, optimizer, scheduler, ema, args):
    losses = AverageMeter()
    model.train()
    for x, target in loader:
        x, target = mixup(x, target, args)
        loss = torch.sum(-target * F.log_softmax(model(x), dim=-1), dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ema.update(model.module)
        losses.update(reduce_tensor(loss.detach(), dist.get_world_size()).item(), x.size(0))
    return losses.avg


@torch.no_grad()
def validate(model, loader):
    top1 = AverageMeter()
    model.eval()
    for x, target in loader:
        correct = (model(x).argmax(1) == target).float().mean() * 100
        top1.update(reduce_tensor(correct, dist.get_world_size()).item(), x.size(0))
    return top1.avg


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42 + rank)
    images = torch.randn(96, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(images, images.mean((2, 3)).argmax(1))
    train_set, val_set = TensorDataset(*data[:64]), TensorDataset(*data[64:])
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, args.batch_size, sampler=val_sampler)

    features = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, args.num_classes)]
    model = nn.Sequential(*features, *head)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, nesterov=True)
    model = DDP(model, broadcast_buffers=False)
    ema = ModelEma(model.module, args.model_ema_decay)
    steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    saver = CheckpointSaver(args.output) if rank == 0 else None

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, train_loader, optimizer, scheduler, ema, args)
        distribute_bn(model, world_size)
        top1 = validate(model, val_loader)
        distribute_bn(ema.module, world_size)
        top1_ema = validate(ema.module, val_loader)
        if saver is not None:
            print(f"epoch {epoch}: loss {loss:.3f}, top-1 {top1:.1f}, EMA {top1_ema:.1f}")
            saver.save(model, ema, optimizer, epoch, top1_ema)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
