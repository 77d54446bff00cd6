import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

PAD, BOS = 0, 1


class SoftDotAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear_in = nn.Linear(width, width, bias=False)
        self.linear_out = nn.Linear(2 * width, width, bias=False)

    def forward(self, h, context, ctx_mask=None):
        target = self.linear_in(h).unsqueeze(2)
        attn = torch.bmm(context, target).squeeze(2)
        if ctx_mask is not None:
            attn = attn.masked_fill(ctx_mask == 0, float("-inf"))
        attn = F.softmax(attn, dim=1)
        weighted = torch.bmm(attn.unsqueeze(1), context).squeeze(1)
        return torch.tanh(self.linear_out(torch.cat([weighted, h], 1)))


class LSTMAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.attention = SoftDotAttention(width)

    def forward(self, inputs, state, context, ctx_mask=None):
        outputs = []
        for t in range(inputs.shape[1]):
            h, c = self.cell(inputs[:, t], state)
            h_tilde = self.attention(h, context)
            outputs.append(h_tilde)
            state = (h_tilde, c)
        return torch.stack(outputs, 1)


class Seq2SeqAttention(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.src_embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.trg_embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.encoder = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.encoder2decoder = nn.Linear(width, width)
        self.decoder = LSTMAttention(width)
        self.decoder2vocab = nn.Linear(width, vocabulary)

    def forward(self, src, trg, ctx_mask):
        context, (h, _) = self.encoder(self.src_embedding(src))
        start = torch.tanh(self.encoder2decoder(torch.cat([h[0], h[1]], 1)))
        out = self.decoder(self.trg_embedding(trg), (start, torch.zeros_like(start)), context, ctx_mask)
        return self.decoder2vocab(out)


def get_minibatch(generator, count=12, longest=8, vocabulary=16):
    lengths = torch.randint(3, longest + 1, (count,), generator=generator)
    src = torch.randint(2, vocabulary, (count, longest), generator=generator)
    mask = (torch.arange(longest) < lengths.unsqueeze(1)).long()
    src = src * mask
    output = torch.zeros_like(src)
    for row, length in enumerate(lengths.tolist()):
        output[row, :length] = src[row, :length].flip(0)
    inputs = F.pad(output[:, :-1], (1, 0), value=BOS)
    return {"input_src": src, "mask_src": mask, "input_trg": inputs, "output_trg": output}


config = {"lr": 6e-3, "clip_c": 1.0, "vocabulary": 16}


def run(args):
    model = Seq2SeqAttention(config["vocabulary"], args.width)
    weight_mask = torch.ones(config["vocabulary"])
    weight_mask[PAD] = 0
    criterion = nn.CrossEntropyLoss(weight=weight_mask)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    generator = torch.Generator().manual_seed(args.seed + 1)
    losses = []
    for _ in range(args.steps):
        batch = get_minibatch(generator)
        logits = model(batch["input_src"], batch["input_trg"], batch["mask_src"])
        loss = criterion(logits.flatten(0, 1), batch["output_trg"].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["clip_c"])
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    print("RESULT " + json.dumps({"losses": run(args)}))
