import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F


class BatchTopKSAE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.b_dec = nn.Parameter(torch.zeros(cfg["act_size"]))
        self.b_enc = nn.Parameter(torch.zeros(cfg["dict_size"]))
        self.W_enc = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(cfg["act_size"], cfg["dict_size"])))
        self.W_dec = nn.Parameter(self.W_enc.detach().t().clone())
        self.W_dec.data /= self.W_dec.data.norm(dim=-1, keepdim=True)
        self.num_batches_not_active = torch.zeros(cfg["dict_size"])

    def forward(self, x):
        acts = F.relu((x - self.b_dec) @ self.W_enc + self.b_enc)
        topk = torch.topk(acts.flatten(), self.cfg["top_k"] * len(x))
        acts_topk = torch.zeros_like(acts.flatten()).scatter(-1, topk.indices, topk.values).reshape(acts.shape)
        x_reconstruct = acts_topk @ self.W_dec + self.b_dec
        self.update_inactive_features(acts_topk)
        return self.get_loss_dict(x, x_reconstruct, acts, acts_topk)

    def update_inactive_features(self, acts):
        self.num_batches_not_active += (acts.sum(0) == 0).float()
        self.num_batches_not_active[acts.sum(0) > 0] = 0

    def get_loss_dict(self, x, x_reconstruct, acts, acts_topk):
        l2_loss = (x_reconstruct.float() - x.float()).pow(2).mean()
        l1_loss = self.cfg["l1_coeff"] * acts_topk.float().abs().sum(-1).mean()
        aux_loss = self.get_auxiliary_loss(x, x_reconstruct, acts)
        return {"loss": l2_loss + l1_loss + aux_loss, "l2_loss": l2_loss, "aux_loss": aux_loss, "l0": (acts_topk > 0).float().sum(-1).mean()}

    def get_auxiliary_loss(self, x, x_reconstruct, acts):
        dead = self.num_batches_not_active >= self.cfg["n_batches_to_dead"]
        if dead.sum() == 0:
            return torch.tensor(0.0)
        residual = x.float() - x_reconstruct.float()
        top = torch.topk(acts[:, dead], min(self.cfg["top_k_aux"], int(dead.sum())), dim=-1)
        acts_aux = torch.zeros_like(acts[:, dead]).scatter(-1, top.indices, top.values)
        x_reconstruct_aux = acts_aux @ self.W_dec[dead]
        return self.cfg["aux_penalty"] * (x_reconstruct_aux.float() - residual).pow(2).mean()

    @torch.no_grad()
    def make_decoder_weights_and_grad_unit_norm(self):
        normed = self.W_dec / self.W_dec.norm(dim=-1, keepdim=True)
        self.W_dec.grad -= (self.W_dec.grad * normed).sum(-1, keepdim=True) * normed
        self.W_dec.data = normed


class ActivationsStore:
    def __init__(self, cfg):
        self.directions = torch.randn(24, cfg["act_size"], generator=torch.Generator().manual_seed(5))
        self.generator = torch.Generator().manual_seed(cfg["seed"] + 1)
        self.batch_size = cfg["batch_size"]

    def next_batch(self):
        strength = torch.rand(self.batch_size, 24, generator=self.generator)
        strength = strength * (torch.rand(self.batch_size, 24, generator=self.generator) < 0.1)
        return strength @ self.directions


def train_sae(sae, activation_store, cfg):
    optimizer = torch.optim.Adam(sae.parameters(), lr=cfg["lr"], betas=(0.9, 0.99))
    losses = []
    for _ in range(cfg["num_batches"]):
        output = sae(activation_store.next_batch())
        output["loss"].backward()
        torch.nn.utils.clip_grad_norm_(sae.parameters(), cfg["max_grad_norm"])
        sae.make_decoder_weights_and_grad_unit_norm()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([output["l2_loss"].item(), output["aux_loss"].item()])
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    cfg = {
        "act_size": 12, "dict_size": args.width, "top_k": 2, "top_k_aux": 8, "l1_coeff": 0.0, "aux_penalty": 0.5, "n_batches_to_dead": 1,
        "lr": 4e-3, "batch_size": 8, "num_batches": args.steps, "max_grad_norm": 1.0, "seed": args.seed,
    }
    print("RESULT " + json.dumps({"losses": train_sae(BatchTopKSAE(cfg), ActivationsStore(cfg), cfg)}))
