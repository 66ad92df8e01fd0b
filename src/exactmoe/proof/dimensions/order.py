"""Order: how the (id, weight) pairs of a row are arranged."""

from dataclasses import replace

from exactmoe.proof.numbers import permutations
from exactmoe.proof.trial import Trial

_STREAM = 30
_WIDTHS = (1, 8, 65)


def order(trial: Trial) -> None:
    """`layer.experts` with the pairs of each row reversed, rotated and shuffled.

    The second token has an id twice, with two weights, and the third an absent one.
    """
    if trial.entry.name != "experts":
        return
    for tokens in _WIDTHS:
        batch = trial.random(tokens, _STREAM)
        assert batch.expert_ids is not None and batch.weights is not None
        top_k = batch.expert_ids.shape[1]
        if tokens > 2 and top_k > 1:
            batch.expert_ids[1, 1] = batch.expert_ids[1, 0]
            batch.expert_ids[2, 0] = -1
        expected = trial.run(batch)
        shuffled = permutations(tokens, top_k, trial.seed, batch.x.device)
        rising = shuffled.sort(dim=1).values
        arranged = {"reversed": rising.flip(1), "rotated": rising.roll(1, 1), "shuffled": shuffled}
        for name, columns in arranged.items():
            ids, weights = (t.gather(1, columns) for t in (batch.expert_ids, batch.weights))
            y = trial.run(replace(batch, expert_ids=ids, weights=weights))
            trial.compare("order", f"pairs {name}", expected, y)
