import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F


class VectorQuantizerEMA(nn.Module):
    def __init__(self, num_embeddings, embedding_dim, commitment_cost, decay, epsilon=1e-5):
        super().__init__()
        self._num_embeddings = num_embeddings
        self._embedding_dim = embedding_dim
        self._embedding = nn.Embedding(num_embeddings, embedding_dim)
        self._embedding.weight.data.normal_()
        self._embedding.weight.requires_grad_(False)
        self._commitment_cost = commitment_cost
        self.register_buffer("_ema_cluster_size", torch.zeros(num_embeddings))
        self.register_buffer("_ema_w", self._embedding.weight.clone())
        self._decay = decay
        self._epsilon = epsilon

    @torch.no_grad()
    def _update(self, encodings, flat_input):
        self._ema_cluster_size.mul_(self._decay).add_(encodings.sum(0), alpha=1 - self._decay)
        n = self._ema_cluster_size.sum()
        size = (self._ema_cluster_size + self._epsilon) / (n + self._num_embeddings * self._epsilon) * n
        self._ema_w.mul_(self._decay).add_(encodings.t() @ flat_input, alpha=1 - self._decay)
        self._embedding.weight.copy_(self._ema_w / size.unsqueeze(1))

    def forward(self, inputs):
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        flat_input = inputs.view(-1, self._embedding_dim)
        distances = flat_input.pow(2).sum(1, keepdim=True) + self._embedding.weight.pow(2).sum(1) - 2 * flat_input @ self._embedding.weight.t()
        indices = distances.argmin(1)
        encodings = F.one_hot(indices, self._num_embeddings).float()
        quantized = torch.matmul(encodings, self._embedding.weight).view(inputs.shape)
        e_latent_loss = F.mse_loss(quantized.detach(), inputs)
        loss = self._commitment_cost * e_latent_loss
        if self.training:
            self._update(encodings, flat_input.detach())
        quantized = inputs + (quantized - inputs).detach()
        probabilities = encodings.mean(0)
        perplexity = torch.exp(-torch.sum(probabilities * torch.log(probabilities + 1e-10)))
        return loss, quantized.permute(0, 3, 1, 2).contiguous(), perplexity


class Residual(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self._block = nn.Sequential(nn.ReLU(), nn.Conv2d(channels, hidden, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(hidden, channels, 1, bias=False))

    def forward(self, x):
        return x + self._block(x)


class Model(nn.Module):
    def __init__(self, width, codes=12, dim=4):
        super().__init__()
        self._encoder = nn.Sequential(nn.Conv2d(1, width, 4, stride=2, padding=1), Residual(width, width // 2), nn.ReLU())
        self._pre_vq_conv = nn.Conv2d(width, dim, 1)
        self._vq_vae = VectorQuantizerEMA(codes, dim, 0.25, 0.9)
        self._decoder = nn.Sequential(nn.Conv2d(dim, width, 3, padding=1), Residual(width, width // 2), nn.ReLU(), nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1))

    def forward(self, x):
        loss, quantized, perplexity = self._vq_vae(self._pre_vq_conv(self._encoder(x)))
        return loss, self._decoder(quantized), perplexity


parser = argparse.ArgumentParser()
parser.add_argument("--num-training-updates", type=int, default=22)
parser.add_argument("--width", type=int, default=12)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(args.seed)
generator = torch.Generator().manual_seed(args.seed + 1)
training_data = torch.randn(64, 1, 3, 3, generator=generator)
training_data = F.interpolate(training_data, size=(12, 12), mode="bilinear")
data_variance = training_data.var()

model = Model(args.width)
optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=3e-3, amsgrad=False)
model.train()
train_res_recon_error, train_res_perplexity = [], []
for i in range(args.num_training_updates):
    data = training_data[torch.randperm(64, generator=generator)[:8]]
    optimizer.zero_grad()
    vq_loss, data_recon, perplexity = model(data)
    recon_error = F.mse_loss(data_recon, data) / data_variance
    loss = recon_error + vq_loss
    loss.backward()
    optimizer.step()
    train_res_recon_error.append(recon_error.item())
    train_res_perplexity.append(perplexity.item())
print("RESULT " + json.dumps({"recon": train_res_recon_error, "perplexity": train_res_perplexity}))
