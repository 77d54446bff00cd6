"""Ordinary trainings with peft, one a kind, all of them right.

Kinds: ia3, loha, lokr, oft, vera, adalora, ln_tuning, prompt_tuning, prefix_tuning, biases, tokens, loraplus, two_at_once, weighted, merged_then_whole, preference, head_kept_apart, frozen_halves, trainer, checkpointed, injected
"""
import argparse
import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import peft
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iters", type=int, default=10)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--kind", default="ia3")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(args.seed)
kind = args.kind
ids = (torch.randint(16, (160, 1)) + torch.randint(1, 4, (160, 1)) * torch.arange(8)) % 16
LINEAR = {"target_modules": ["c_attn"], "fan_in_fan_out": True}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first, self.norm, self.second, self.head = nn.Embedding(16, 24), nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 24), nn.Linear(24, 16)

    def forward(self, tokens):
        x = self.words(tokens).cumsum(1)
        return self.head(self.norm(F.gelu(self.second(F.gelu(self.first(x)))) + x))


def gpt():
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=24, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))


def loss_of(model, batch):
    if (isinstance(model, peft.PeftModel) and hasattr(model.get_base_model(), "lm_head")) or hasattr(model, "lm_head"):
        return model(input_ids=batch, labels=batch).loss
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def fit(model, optimizer=None, updates=args.iters, each=None, loss_of=loss_of):
    optimizer = optimizer or torch.optim.AdamW(trained(model), 3e-3)
    model.train()
    done = 0
    while done < updates:
        for batch in DataLoader(ids, 16, shuffle=True, drop_last=True):
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            if each is not None:
                each(done)
            optimizer.zero_grad()
            done += 1
            if done == updates:
                break
    print(kind, loss.item())
    return optimizer


def keep(model, **options):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **options)


PLAIN = ["first", "second"]
SIMPLE = {
    "ia3": lambda: peft.IA3Config(target_modules=PLAIN, feedforward_modules=["second"]), "loha": lambda: peft.LoHaConfig(r=2, alpha=4, target_modules=PLAIN),
    "lokr": lambda: peft.LoKrConfig(r=2, alpha=4, target_modules=PLAIN), "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=PLAIN),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=PLAIN), "ln_tuning": lambda: peft.LNTuningConfig(target_modules=["norm"]),
    "biases": lambda: LoraConfig(r=2, target_modules=PLAIN, bias="lora_only", modules_to_save=["head"]),
}  # fmt: skip
if kind in SIMPLE:
    model = get_peft_model(Net(), SIMPLE[kind]())
    fit(model)
    keep(model)
elif kind == "adalora":
    model = get_peft_model(Net(), peft.AdaLoraConfig(init_r=4, target_r=2, tinit=2, tfinal=2, total_step=args.iters, target_modules=PLAIN))
    fit(model, each=lambda done: model.base_model.update_and_allocate(done))
    keep(model)
elif kind in ("prompt_tuning", "prefix_tuning"):
    config = peft.PromptTuningConfig if kind == "prompt_tuning" else peft.PrefixTuningConfig
    model = get_peft_model(gpt(), config(task_type="CAUSAL_LM", num_virtual_tokens=4))
    fit(model)
    keep(model)
elif kind == "tokens":
    model = get_peft_model(gpt(), LoraConfig(r=2, trainable_token_indices={"wte": [1, 2, 3]}, **LINEAR))
    fit(model)
    keep(model)
elif kind == "loraplus":
    from peft.optimizers import create_loraplus_optimizer

    model = get_peft_model(Net(), LoraConfig(r=2, target_modules=PLAIN))
    fit(model, create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=4))
elif kind in ("two_at_once", "weighted"):
    model = get_peft_model(Net(), LoraConfig(r=2, target_modules=PLAIN), adapter_name="a")
    model.add_adapter("b", LoraConfig(r=2, target_modules=PLAIN))
    fit(model)
    if kind == "two_at_once":
        model.base_model.set_adapter(["a", "b"])
        fit(model)
        keep(model)
    else:
        model.set_adapter("b")
        fit(model)
        model.add_weighted_adapter(["a", "b"], [0.5, 0.5], "mean", combination_type="linear")
        model.set_adapter("mean")
        keep(model, selected_adapters=["mean"])
        fit(model)
elif kind == "merged_then_whole":
    model = get_peft_model(Net(), LoraConfig(r=2, target_modules=PLAIN))
    fit(model)
    keep(model)
    whole = model.merge_and_unload()
    whole.requires_grad_(True)
    fit(whole)
elif kind == "preference":
    model = get_peft_model(gpt(), LoraConfig(r=4, **LINEAR))

    def preference(model, batch):
        worse = (batch + torch.randint(1, 3, batch.shape)) % 16
        gaps = [model(input_ids=b, labels=b).loss for b in (batch, worse)]
        with torch.no_grad(), model.disable_adapter():
            known = [model(input_ids=b, labels=b).loss for b in (batch, worse)]
        return -F.logsigmoid((known[0] - gaps[0]) - (known[1] - gaps[1]))

    fit(model, loss_of=preference)
    keep(model)
elif kind == "head_kept_apart":
    model = get_peft_model(Net(), LoraConfig(r=2, target_modules=PLAIN))
    model.base_model.model.head.requires_grad_(True)
    fit(model)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.base_model.model.head.state_dict(), f"{folder}/head.pt")
        model.save_pretrained(folder)
elif kind == "frozen_halves":
    model = get_peft_model(Net(), LoraConfig(r=2, target_modules=PLAIN))
    for name, p in model.named_parameters():
        if "lora_A" in name:
            p.requires_grad_(False)
    fit(model)
    keep(model)
elif kind == "trainer":
    from transformers import Trainer, TrainingArguments

    class Rows(Dataset):
        def __len__(self):
            return len(ids)

        def __getitem__(self, i):
            return {"input_ids": ids[i], "labels": ids[i]}

    model = get_peft_model(gpt(), LoraConfig(task_type="CAUSAL_LM", r=2, **LINEAR))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, max_steps=args.iters, per_device_train_batch_size=8, gradient_accumulation_steps=2, save_steps=5, eval_strategy="steps", eval_steps=5, report_to=[], use_cpu=True, disable_tqdm=True)
        Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows()).train()
        model.save_pretrained(folder)
elif kind == "checkpointed":
    base = gpt()
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    base.enable_input_require_grads()
    model = get_peft_model(base, LoraConfig(r=2, **LINEAR))
    fit(model)
    keep(model)
elif kind == "injected":
    model = Net()
    peft.inject_adapter_in_model(LoraConfig(r=2, target_modules=PLAIN), model)
    fit(model)
    torch.save(peft.get_peft_model_state_dict(model), os.devnull)
