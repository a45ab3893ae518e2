import torch

from lit_msar.model.recompute import recomputed


class Choosing:
    """Scales each row by its largest score; what the scores are may change between two calls."""

    def __init__(self):
        self.scores, self.calls, self.chosen = torch.tensor([[1.0, 2.0, 3.0]]), 0, []

    def __call__(self, x):
        self.calls += 1
        index = self.scores.topk(1, dim=-1).indices
        self.chosen.append(index.item())
        extra = torch.empty(2) if self.calls > 1 else None  # as a gather that one run makes and the other does not
        assert extra is None or extra.shape == (2,)
        return (x * x).gather(-1, index)


def test_the_choice_is_kept_when_scores_change():
    function, x = Choosing(), torch.tensor([[5.0, 6.0, 7.0]], requires_grad=True)
    y = recomputed(function, x)
    function.scores = torch.tensor([[3.0, 2.0, 1.0]])
    y.sum().backward()
    assert function.calls == 2, "the insides are run again"
    assert function.chosen == [2, 2]
    assert x.grad.tolist() == [[0.0, 0.0, 14.0]]


def test_stable_sorts_are_kept_in_order():
    keys = [torch.tensor([2, 1, 1]), torch.tensor([1, 1, 2])]
    seen = []

    def function(x):
        for key in keys:
            order = key.sort(stable=True).indices
            seen.append(order.tolist())
            x = x[order] ** 2
        return x

    y = recomputed(function, torch.tensor([1.0, 2.0, 3.0], requires_grad=True))
    keys.reverse()
    y.sum().backward()
    assert seen[:2] == seen[2:] == [[1, 2, 0], [0, 1, 2]]
