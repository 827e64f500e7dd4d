"""What holds for every task: shapes, vocabulary, purity, fixed evaluation sets, one order for workers and ranks."""

import inspect
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from fprnn_lightning.sentences import concrete_subclasses
from fprnn_lightning.tasks import (
    AssociativeRecall,
    Copying,
    DuplicateCopying,
    PrefixLookup,
    SelectiveCopying,
    SequenceTask,
    SuffixLookup,
    WordProblem,
)
from fprnn_lightning.tasks.catbabi import CatBabi
from fprnn_lightning.tasks.contexts import ContextTask
from fprnn_lightning.tasks.csv_files import CsvFiles, write_csv
from fprnn_lightning.tasks.text import Text

SMALL = dict(
    batch_size=8, train_length=5, validation_lengths=(7, 3), test_lengths=(4,), validation_sequences=150,
    test_sequences=70, evaluation_batch_size=32, seed=3,
)  # fmt: skip
CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "task").glob("*.yaml"))
TASKS = [task for task in concrete_subclasses(SequenceTask) if task.__module__.startswith("fprnn_lightning.")]


@pytest.fixture(scope="module")
def needed(tmp_path_factory):
    """Options that a task cannot do without, or not with sequences as small as these."""
    folder, source = tmp_path_factory.mktemp("data"), WordProblem("Z7", batch_size=160, train_length=70)
    files = {f"{name}_file": folder / f"{name}.csv" for name in ("train", "validation", "test")}
    for index, path in enumerate(files.values()):
        write_csv(path, source.seed, [source.batch("train", index)])
    text = folder / "text.txt"
    text.write_text("".join(f"{number} squared is {number**2}\n" for number in range(400)))
    for split in ("train", "valid", "test"):
        stories = "".join(f"1\tis {split} {number} ? yes\n" for number in range(60))
        (folder / f"en-valid-10k_{split}.txt").write_text(stories)
    lookup = {"ngram": 1, "answer_length": 1, "alphabet": 64, "shortest": 2, "longest": 2}
    return {
        CsvFiles: {**files, "vocab_size": 7},
        Text: {"files": str(text)},
        CatBabi: {"folder": folder},
        AssociativeRecall: {"pairs": 1},
        Copying: {"shortest": 1, "longest": 1},
        DuplicateCopying: {"ngram": 1, "alphabet": 1024, "shortest": 3, "longest": 3, "train_length": 8},
        PrefixLookup: {**lookup, "train_length": 7},
        SuffixLookup: {**lookup, "train_length": 6},
        SelectiveCopying: {"answer_length": 3, "shortest": 3, "longest": 3, "train_length": 8},
    }


@pytest.fixture(params=TASKS, ids=lambda task: task.__name__)
def make(request, needed):
    return lambda **options: request.param(**SMALL | needed.get(request.param, {}) | options)


def head(loader, batches):
    return [batch for _, batch in zip(range(batches), loader, strict=False)]


def same(a, b):
    return torch.equal(torch.cat([x for x, *_ in a]), torch.cat([x for x, *_ in b])) and torch.equal(
        torch.cat([y for _, y, *_ in a]), torch.cat([y for _, y, *_ in b])
    )


def on_device(task, rank, ranks, consumed=0, accumulated=1):
    progress = SimpleNamespace(total=SimpleNamespace(processed=consumed))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    places = {"global_rank": rank, "world_size": ranks, "accumulate_grad_batches": accumulated}
    share = {"rank": rank, "num_replicas": ranks}
    task.trainer = SimpleNamespace(fit_loop=loop, distributed_sampler_kwargs=share, **places)
    return task


def test_word_problem_is_registered():
    assert WordProblem in TASKS


@pytest.mark.parametrize(("split", "sequences"), [("train", 8), ("validation", 30), ("test", 23)])
def test_shapes_types_vocabulary(make, split, sequences):
    task = make()
    length = {"train": task.train_length, "validation": task.tokens_at(7), "test": task.tokens_at(50)}[split]
    tokens, targets = task.batch(split, 0)
    for array in (tokens, targets):
        assert array.shape == (sequences, length)
        assert array.dtype == torch.int64
        assert array.is_contiguous()
    assert 0 <= tokens.min() <= tokens.max() < task.vocab_size
    scored = targets[targets != -100]
    assert len(scored) > 0
    assert 0 <= scored.min() <= scored.max() < task.vocab_size
    assert 1 / task.vocab_size <= task.chance < 1
    assert task.name == task.name.lower() != ""


@pytest.mark.parametrize("make", [task for task in TASKS if task.prompt_overhead is not None], indirect=True)
def test_prompts_of_a_length_have_answers_of_a_length(make):
    task, lengths = make(), []
    for targets in task.batch("validation", 0)[1].tolist():
        scored = [position for position, target in enumerate(targets) if target != -100]
        lengths.append(scored[0] + 1 - task.prompt_overhead)
        assert scored == list(range(scored[0], task.tokens_at(lengths[-1])))
    assert set(lengths) == set(task.validation_lengths)


def test_lengths_are_sorted_and_hold_the_papers(make):
    task = make(validation_lengths=[9, 3, 9], test_lengths=[64, 4])
    assert task.validation_lengths == [3, 9]
    assert task.test_lengths == [4, 50, 64]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_batches_depend_on_seed_split_and_index_alone(make, split):
    task, again = make(), make()
    batch = task.batch(split, 1)
    for index in (0, 2):
        assert not torch.equal(task.batch(split, index)[0], batch[0])
    torch.manual_seed(5)
    assert same([task.batch(split, 1)], [batch])
    assert same([again.batch(split, 1)], [batch])
    fixed = isinstance(task, (CsvFiles, ContextTask)) and split != "train"  # in files
    assert torch.equal(make(seed=4).batch(split, 1)[0], batch[0]) == fixed


def test_splits_differ(make):
    task = make(train_length=50, validation_lengths=[50], batch_size=32)
    tails = [{tuple(row[25:]) for row in task.batch(split, 0)[0].tolist()} for split in ("train", "validation", "test")]
    tails = [{tail for tail in split if len(set(tail)) > 1} for split in tails]  # one that is padding says nothing
    assert all(tails)
    assert not tails[0] & tails[1]
    assert not tails[0] & tails[2]
    assert not tails[1] & tails[2]


@pytest.mark.parametrize("make", [task for task in TASKS if task.prefix_closed], indirect=True)
def test_a_shorter_sequence_is_a_prefix_of_a_longer(make):
    short, long = make(), make(train_length=40, validation_lengths=[40])
    for split in ("train", "validation"):
        for a, b in zip(short.batch(split, 0), long.batch(split, 0), strict=True):
            assert torch.equal(a, b[:, : a.shape[1]])


def test_evaluation_sets_are_fixed(make):
    whole = list(make().val_dataloader())
    assert len(torch.cat([x for x, _ in whole])) == 150
    assert same(whole, [make().batch("validation", i) for i in range(len(whole))])
    for options in (dict(evaluation_batch_size=7), dict(evaluation_batch_size=1000), dict(batch_size=3)):
        other = list(make(**options).val_dataloader())
        assert max(len(x) for x, _ in other) <= options.get("evaluation_batch_size", 32)
        assert same(other, whole)
    fewer = torch.cat([x for x, _ in make(validation_sequences=70).val_dataloader()])
    assert torch.equal(fewer, torch.cat([x for x, _ in whole])[:70])


def test_predict_gives_the_tokens_of_test(make):
    tokens = torch.cat([x for x, _ in make().test_dataloader()])
    assert torch.equal(torch.cat(list(make().predict_dataloader())), tokens)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # with fewer cores than that
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_one_order(make, workers):
    alone, helped = make(), make(workers=workers)
    assert same(head(helped.train_dataloader(), 7), [alone.batch("train", i) for i in range(7)])
    assert same(list(helped.val_dataloader()), list(alone.val_dataloader()))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("ranks", "accumulated"), [(4, 1), (2, 1), (1, 2), (2, 4)])
def test_ranks_and_accumulated_batches_share_the_batch_of_a_step(make, ranks, accumulated, workers):
    options = {"ranks": ranks, "accumulated": accumulated}
    places = [on_device(make(workers=workers), rank, **options) for rank in range(ranks)]
    shares = [head(place.train_dataloader(), 3 * accumulated) for place in places]
    dealt = [batch for turn in zip(*shares, strict=True) for batch in turn]
    assert {len(tokens) for tokens, *_ in dealt} == {8 // ranks // accumulated}
    whole = [make().batch("train", step) for step in range(3)]
    assert same(dealt, whole)
    for index, (_, _, scored) in enumerate(dealt):
        targets = whole[index // (ranks * accumulated)][1]
        for length in range(1, targets.shape[1] + 1):
            is_scored = targets[:, :length] != -100
            assert scored[:, length - 1].tolist() == [is_scored.sum(), is_scored.any(1).sum()]


@pytest.mark.parametrize(("ranks", "accumulated"), [(3, 1), (1, 3), (16, 1), (2, 8)])
def test_a_batch_that_cannot_be_shared_evenly_is_refused(make, ranks, accumulated):
    with pytest.raises(ValueError, match=f"batch_size is 8 .* {ranks} device.*; [0-9]+ can"):
        on_device(make(), 0, ranks, accumulated=accumulated).train_dataloader()


@pytest.mark.parametrize(("ranks", "sequences"), [(2, 150), (3, 150), (4, 150), (4, 3)])
def test_ranks_share_the_batches_of_evaluation_sets(make, ranks, sequences):
    sizes = {"validation_sequences": sequences}
    shares = [list(on_device(make(**sizes), rank, ranks).val_dataloader()) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    dealt = [batch for turn in zip(*shares, strict=True) for batch in turn]
    whole = list(make(**sizes).val_dataloader())
    assert make(**sizes).evaluation_batches("validation") == len(whole)
    assert all(same([ours], [theirs]) for ours, theirs in zip(dealt, whole, strict=False))
    for tokens, targets in dealt[len(whole) :]:
        assert tokens.shape == targets.shape == (1, whole[0][0].shape[1])
        assert (targets == -100).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_every_pass_begins_where_training_stands(make, workers):
    task = on_device(make(workers=workers), 1, 2)
    loader = task.train_dataloader()
    halves = [[part.chunk(2)[1] for part in make().batch("train", i)] for i in range(5)]
    assert same(head(loader, 3), halves[:3])
    on_device(task, 1, 2, consumed=2)
    assert same(head(loader, 3), halves[2:])


def test_what_travels_to_a_worker_leaves_the_trainer_behind(make):
    task = on_device(make(), 0, 1)
    task.trainer.model = lambda: "cannot be pickled"
    for loader in (task.train_dataloader(), task.val_dataloader(), task.predict_dataloader()):
        stream, collate = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn)))
        assert torch.equal(collate(next(iter(stream)))[0], next(iter(loader))[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(train_length=0), "train_length must be at least 1, got 0"),
        (dict(batch_size=0), "batch_size must be at least 1, got 0"),
        (dict(evaluation_batch_size=-1), "evaluation_batch_size must be at least 1, got -1"),
        (dict(validation_sequences=0), "validation_sequences must be at least 1, got 0"),
        (dict(test_sequences=0), "test_sequences must be at least 1, got 0"),
        (dict(seed=-1), "seed must be at least 0, got -1"),
        (dict(workers=-1), "workers must be at least 0, got -1"),
        (dict(validation_lengths=[16, 0]), r"validation_lengths .* at least 1, got \[16, 0\]"),
        (dict(test_lengths=[]), r"test_lengths .* at least 1, got \[\]"),
    ],
)
def test_bad_options_are_answered_in_one_sentence(make, options, message):
    with pytest.raises(ValueError, match=message) as error:
        make(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_the_command_line_knows_every_shared_option(task, needed):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(SequenceTask, "data")
    shared = inspect.signature(SequenceTask).parameters
    options = {name: str(value) if isinstance(value, Path) else value for name, value in needed.get(task, {}).items()}
    options |= {"test_lengths": [9], "seed": 2}
    parsed = parser.parse_object({"data": {"class_path": task.__name__, "init_args": options}})
    assert set(shared) <= set(parsed.data.init_args.as_dict())
    built = parser.instantiate(parsed).data
    assert (type(built), built.seed, built.test_lengths) == (task, 2, [9, 50])
    with pytest.raises(Exception, match="batchsize"):
        parser.parse_object({"data": {"class_path": task.__name__, "init_args": {"batchsize": 2}}})


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config(config, published_files, monkeypatch):
    monkeypatch.chdir(published_files)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(SequenceTask, "data")
    task = parser.instantiate(parser.parse_object({"data": yaml.safe_load(config.read_text())["data"]})).data
    assert task.name == {"csv_files": "a5"}.get(config.stem, config.stem)
    assert task.batch("train", 0)[0].shape == (task.batch_size, task.train_length)
