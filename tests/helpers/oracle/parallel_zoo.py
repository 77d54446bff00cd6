"""Small models of the real classes of transformers and diffusers, and a few steps of training."""

import torch

PLANS = {
    "llama": ["llama", "llama_4d"],
    "gpt2": ["gpt2"],
    "mixtral": ["mixtral", "mixtral_4d"],
    "bert": ["bert"],
    "vit": ["vit"],
    "dit": ["dit_4d"],
}
LIBRARY = {"dit": "diffusers"}


def llama(dropout):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        attention_dropout=dropout, use_cache=False, attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def mixtral(dropout):
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, num_local_experts=4,
        attention_dropout=dropout, router_jitter_noise=dropout / 10, use_cache=False, sliding_window=None,
    )
    return transformers.MixtralForCausalLM(config)


def gpt2(dropout):
    import transformers

    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config)


def bert(dropout):
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=32,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForMaskedLM(config)


def vit(dropout):
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=8, num_labels=8,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )
    return transformers.ViTForImageClassification(config)


def dit(dropout):
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=16, dropout=dropout,
    )
    for block in model.transformer_blocks:  # 0.1 as it comes
        block.norm1.emb.class_embedder.dropout_prob = dropout
    return model


MODELS = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral, "bert": bert, "vit": vit, "dit": dit}


def loss_of(model, name, generator):
    """Of one batch of four rows."""
    if name == "vit":
        pictures, labels = torch.randn(4, 3, 16, 16, generator=generator), torch.randint(0, 8, (4,), generator=generator)
        return model(pixel_values=pictures, labels=labels).loss
    if name == "dit":
        noisy, noise = torch.randn(4, 4, 8, 8, generator=generator), torch.randn(4, 4, 8, 8, generator=generator)
        times, labels = torch.randint(0, 1000, (4,), generator=generator), torch.randint(0, 16, (4,), generator=generator)
        return (model(noisy, timestep=times, class_labels=labels).sample - noise).square().mean()
    tokens = torch.randint(0, 64, (4, 12), generator=generator)
    out = model(input_ids=tokens, labels=tokens)
    assert out.logits.shape == (4, 12, 64)
    return out.loss


def train(model, name, steps):
    """Loss and gradient norm of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    said = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, name, generator)
        loss.backward()
        said += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
        optimizer.step()
    return said
