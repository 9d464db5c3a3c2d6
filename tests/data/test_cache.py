"""The cache against a model without one: sequences of different length that draft, verify, forget and leave."""

import random

import pytest
import torch

from data.batch import Wants
from data.cache import slots_after, step_mask, tree_mask

WANTS = Wants(aux_layers=(), last_hidden_state=False)


def uncached(target, text):
    return target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


def random_tree(choose, nodes):
    return [choose.randrange(-1, node) for node in range(nodes)]


def visible_of(parents):
    """(1 + N, 1 + N): row 0 and, for each node, its ancestors and itself."""
    rows = [[True] + [False] * len(parents)]
    for node, parent in enumerate(parents):
        row = list(rows[parent + 1])
        row[node + 1] = True
        rows.append(row)
    return rows


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("rounds", [25, pytest.param(1_250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("static", [False, True])
def test_random_rounds_give_the_logits_of_a_model_without_cache(tiny_target, family, rounds, static):
    """Each round of each of the 1 to 4 sequences is one draft, verify and forget; 1,250 rounds make 10,000 in all."""
    target = tiny_target(family, torch.float64, num_hidden_layers=2)
    choose = random.Random(0)
    done = 0
    while done < rounds:
        texts = [[choose.randrange(200) for _ in range(choose.randint(1, 12))] for _ in range(choose.randint(1, 4))]
        cache = target.new_cache(len(texts), 80, static)
        width = max(map(len, texts))
        target.step(torch.tensor([text + [7] * (width - len(text)) for text in texts]), cache, WANTS)
        cache.commit(torch.tensor([len(text) - 1 for text in texts]))  # the last token is read by the first round
        while texts and max(map(len, texts)) < 60 and done < rounds:
            done += 1
            nodes = choose.randint(1, 5)
            trees = [random_tree(choose, nodes) if choose.random() < 0.5 else list(range(-1, nodes - 1)) for _ in texts]
            drafts = [[choose.randrange(200) for _ in range(nodes)] for _ in texts]
            read = torch.tensor([[text[-1], *draft] for text, draft in zip(texts, drafts, strict=True)])
            visible = torch.tensor([visible_of(parents) for parents in trees])
            last, _ = target.step(read, cache, WANTS, visible)
            logits = target.logits(last)
            paths = []
            for row, (text, parents) in enumerate(zip(texts, trees, strict=True)):
                node, path = choose.randrange(-1, nodes), []
                while node >= 0:
                    path.insert(0, node)
                    node = parents[node]
                kept = [drafts[row][node] for node in path]
                found = logits[row, path[-1] + 1 if path else 0]
                assert (found - uncached(target, text + kept)).abs().max() < 1e-9
                paths.append([0, *(node + 1 for node in path)])
                texts[row] = [*text, *kept, choose.randrange(200)]
            longest = max(map(len, paths))
            padded = [path + path[-1:] * (longest - len(path)) for path in paths]
            cache.commit_path(torch.tensor(padded), torch.tensor(list(map(len, paths))))
            if choose.random() < 0.2:
                staying = [row for row in range(len(texts)) if choose.random() < 0.7]
                texts = [texts[row] for row in staying]
                cache.keep(torch.tensor(staying, dtype=torch.int64))


def test_masks_by_hand():
    lengths = torch.tensor([2, 0])
    assert step_mask(lengths, 2, 4)[:, 0].int().tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]
    siblings = torch.tensor([[[True, False], [False, True]]] * 2)
    assert tree_mask(lengths, siblings, 4)[:, 0].int().tolist() == [
        [[1, 1, 1, 0], [1, 1, 0, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0]],
    ]


def test_room_is_checked_before_anything_is_written():
    assert slots_after(torch.tensor([2, 5]), 3, 8).end == 8
    assert slots_after(torch.tensor([2, 5]), 1, 8, static=True).end == 8
    with pytest.raises(ValueError, match=r"holds 8 tokens, 9 are needed.*max_tokens"):
        slots_after(torch.tensor([2, 6]), 3, 8)
