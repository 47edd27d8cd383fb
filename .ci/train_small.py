"""Train a small network with an installed cprop: what the wheel must be able to do by itself."""

import torch

import cprop

torch.manual_seed(0)
inputs = torch.randn(512, 10)
targets = (inputs[:, :3].sum(1) > 0).long()

for name, make in {
    "CProp(Adam)": lambda params: cprop.CProp(torch.optim.Adam(params, lr=1e-2)),
    "CPropAdam": lambda params: cprop.CPropAdam(params, lr=1e-2),
    "CPropSGD": lambda params: cprop.CPropSGD(params, lr=0.3, momentum=0.9),
}.items():
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = make(model.parameters())
    for _ in range(300):
        batch = torch.randint(0, 512, (32,))
        loss = torch.nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (model(inputs).argmax(1) == targets).float().mean().item()
    print(f"{name}: accuracy {accuracy:.3f}")
    if accuracy < 0.95:
        raise SystemExit(f"{name} did not learn: accuracy {accuracy:.3f}, expected at least 0.95")
