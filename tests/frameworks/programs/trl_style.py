"""A policy in the style of TRL: text is sampled, rewarded and learned from, against a reference.

run: --nproc-per-node 2
finds: nothing
steps: 16
needs: accelerate, transformers
"""

import copy

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler
from transformers.utils import logging

PROMPT, ANSWER, PAD = 4, 6, 0
PPO_EPOCHS, CLIP, KL = 2, 0.2, 0.05


def token_log_probs(model, tokens):
    logits = model(tokens).logits[:, PROMPT - 1 : -1]
    answers = tokens[:, PROMPT:].unsqueeze(-1)
    return logits.log_softmax(-1).gather(-1, answers).squeeze(-1)


def reward(tokens):
    return (tokens[:, PROMPT:] % 2 == 0).float().mean(1)


def main():
    logging.set_verbosity_error()
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
    )
    model = GPT2LMHeadModel(config)
    ref_model = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompts = torch.randint(2, 32, (64, PROMPT))
    loader = DataLoader(prompts, batch_size=8, shuffle=True, drop_last=True)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=32)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    set_seed(0, device_specific=True)
    for epoch in range(2):
        for queries in loader:
            model.eval()
            with torch.no_grad():
                tokens = accelerator.unwrap_model(model).generate(
                    queries,
                    attention_mask=torch.ones_like(queries),
                    do_sample=True,
                    min_new_tokens=ANSWER,
                    max_new_tokens=ANSWER,
                    pad_token_id=PAD,
                )
                old = token_log_probs(accelerator.unwrap_model(model), tokens)
                kl = (old - token_log_probs(ref_model, tokens)).sum(1)
                scores = reward(tokens) - KL * kl
                every = accelerator.gather(scores)
                advantages = ((scores - every.mean()) / (every.std() + 1e-6)).unsqueeze(1)
            model.train()
            for _ in range(PPO_EPOCHS):
                ratio = (token_log_probs(model, tokens) - old).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = -torch.min(ratio * advantages, clipped * advantages).mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        mean = accelerator.gather_for_metrics(reward(tokens)).mean()
        accelerator.print(f"epoch {epoch}: reward {mean.item():.3f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("policy")
    accelerator.end_training()


if __name__ == "__main__":
    main()
