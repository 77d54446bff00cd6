import torch
class Engine:
    def __init__(self, model, optimizer):
        self.module, self.optimizer = model, optimizer
        self.names = [n for n, p in model.named_parameters()]
        self.steps = 0
    def __call__(self, *a): return self.module(*a)
    def backward(self, loss): loss.backward()
    def step(self):
        self.optimizer.step(); self.optimizer.zero_grad(); self.steps += 1
    def module_state_dict(self):
        full = self.module.state_dict()
        return {n: full[n] for n in self.names}
    def save_checkpoint(self, path):
        torch.save({"module": self.module_state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}, path)
