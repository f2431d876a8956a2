"""DataParallel brings the logits of the whole batch together on the first GPU.

run: exec -- python {}
needs: 2 gpus
finds: DDP201 warning at `logits = model(tokens)`
"""

import torch
from torch import nn


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=32_000, width=256):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.TransformerEncoderLayer(width, 4, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens)))


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.DataParallel(LanguageModel().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(10):
        tokens = torch.randint(0, 32_000, (32, 256), device=device)
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.3f}")


if __name__ == "__main__":
    main()
