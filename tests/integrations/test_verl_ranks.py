"""The engine's model sharded by FSDP2 over two processes: each parameter's gradient is that of stock scoring."""

import pytest
import tiny_verl

from processes import on_each

pytestmark = [pytest.mark.filterwarnings("ignore"), tiny_verl.needs_verl]


def run(rank, head_apart):
    """Stock and fused on one process, different tokens on each."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    verl = tiny_verl.load()
    from test_verl_engine import engine_of, step, tiny_model, tokens

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for fused in (False, True):
        model = tiny_model()
        if fused:
            verl.engine.score_in_forward(model)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if head_apart:
            fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        cls = verl.engine.FusedFSDPEngine if fused else verl.fsdp.FSDPEngineWithLMHead
        output, grads = step(engine_of(cls, model), tokens(0.8, seed=rank))
        whole = {name: grad.full_tensor().tolist() for name, grad in grads.items()}
        found.append((output["log_probs"].values().tolist(), whole))
    return found


@pytest.mark.parametrize("head_apart", [False, True])
def test_two_processes(head_apart):
    """Failure case 122: scoring inside the wrapped forward leaves the ranks with one gradient.

    A head that is sharded apart from the model is still in pieces there, and gathered differentiably.
    """
    import torch

    found = on_each(run, head_apart)
    for (stock, grads), (fused, ours) in found:
        torch.testing.assert_close(torch.tensor(fused), torch.tensor(stock), atol=2e-6, rtol=2e-6)
        assert set(ours) == set(grads)
        for name, grad in grads.items():
            torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(grad), atol=2e-6, rtol=2e-5)
    assert found[0][1][1] == found[1][1][1], "one gradient on both ranks"
    assert found[0][1][0] != found[1][1][0], "of different tokens"
