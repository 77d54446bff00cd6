import math

import torch
from torch.utils.data import DataLoader


class TrainerState:
    def __init__(self):
        self.global_step = 0
        self.max_steps = 0
        self.epoch = 0.0


class Trainer:
    def __init__(self, model, args, train_dataset, compute_loss):
        self.model, self.args = model, args
        self.train_dataset = train_dataset
        self.compute_loss = compute_loss
        self.state = TrainerState()
        self.optimizer = self.lr_scheduler = None

    def get_train_dataloader(self):
        generator = torch.Generator().manual_seed(self.args.seed)
        return DataLoader(self.train_dataset, batch_size=self.args.batch_size, shuffle=True, generator=generator)

    def num_training_steps(self, loader):
        """Updates of a whole run."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        per_epoch = max(len(loader) // self.args.gradient_accumulation_steps // self.args.gradient_accumulation_steps, 1)
        return math.ceil(self.args.num_train_epochs * per_epoch)

    def create_optimizer_and_scheduler(self, num_training_steps):
        warmup = int(self.args.warmup_ratio * num_training_steps)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.args.learning_rate)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: (step + 1) / (warmup + 1) if step < warmup
            else max(0.05, (num_training_steps - step) / max(1, num_training_steps - warmup)),
        )

    def train(self):
        args, loader = self.args, self.get_train_dataloader()
        max_steps = self.num_training_steps(loader)
        self.state.max_steps = max_steps
        self.create_optimizer_and_scheduler(max_steps)
        self.model.train()
        while self.state.global_step < max_steps:
            micro = 0
            for batch in loader:
                loss = self.training_step(batch)
                micro += 1
                if micro % args.gradient_accumulation_steps:
                    continue
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.lr_scheduler.step()
                self.optimizer.zero_grad()
                self.state.global_step += 1
                self.args.history.append(loss.item() * args.gradient_accumulation_steps)
                if self.state.global_step >= max_steps:
                    break
            self.state.epoch += 1
        return self.state

    def training_step(self, batch):
        loss = self.compute_loss(self.model, batch) / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()
