"""The truth that every mesh is compared with: one plain process, plain tensors, nothing imported from the script."""

import torch
import torch.nn.functional as F


def train(model, batches, *, learning_rate, max_grad_norm, optimizer="sgd", weight_decay=0.0):
    """Train on (inputs, labels) batches of (B, S) each, whole batch at once.

    Returns losses, gradient norms (before clipping), and the gradients of the first step by name (after clipping).
    """
    if optimizer == "sgd":
        opt = torch.optim.SGD(model.parameters(), lr=learning_rate)
    else:
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        opt = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    losses, norms, first_grads = [], [], None
    for inputs, labels in batches:
        output = model(input_ids=inputs, use_cache=False)
        loss = F.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
        if getattr(output, "aux_loss", None) is not None:  # of the routers, when the config asks for it
            coefficient = getattr(model, "router_aux_loss_coef", None)
            coefficient = model.config.aux_loss_coef if coefficient is None else coefficient
            loss = loss + coefficient * output.aux_loss
        loss.backward()
        norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None))
        if norm > max_grad_norm:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(max_grad_norm / (norm.float() + 1e-6))
        if first_grads is None:
            first_grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, first_grads
