"""A GPT-2 and a BERT of transformers; `--bug NAME` plants one of the bugs. Needs transformers."""

import argparse

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

ap = argparse.ArgumentParser()
ap.add_argument("--bug", default="")
BUG = ap.parse_args().bug
torch.manual_seed(0)
if BUG in ("", "not_divided", "untied", "sees_ahead"):
    config = GPT2Config(vocab_size=60, n_positions=32, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager")
    model = GPT2LMHeadModel(config)
    if BUG == "untied":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    if BUG == "sees_ahead":
        for block in model.transformer.h:
            block.attn.is_causal = False
        model.transformer.wpe.register_forward_hook(lambda m, i, o: o)
        before = model.transformer.drop.forward
        model.transformer.drop.forward = lambda h: before(h + 0.3 * h.mean(1, keepdim=True))
else:
    config = BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32, attn_implementation="eager")
    model = BertForSequenceClassification(config)
    if BUG == "mask_lost":
        inner = model.bert.forward
        model.bert.forward = lambda input_ids=None, attention_mask=None, **more: inner(input_ids=input_ids, attention_mask=None, **more)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(5):
    optimizer.zero_grad()
    for _ in range(2):
        ids = torch.randint(1, 60, (4, 10))
        mask = (torch.arange(10) < torch.randint(4, 11, (4, 1))).long()
        if isinstance(model, GPT2LMHeadModel):
            loss = model(input_ids=ids, labels=ids).loss
        else:
            loss = model(input_ids=ids, attention_mask=mask, labels=ids[:, 0] % 2).loss
        (loss if BUG == "not_divided" else loss / 2).backward()
    optimizer.step()
