"""The waiting queue alone: one client is first come, first served; several take turns by the tokens they got."""

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.params import SamplingParams
from ridgeline.decoding.request import Request
from ridgeline.engine.queue import WaitingQueue
from ridgeline.engine.request import Sequence


def sequence(number: int, client: int = 0, num_tokens: int = 1, priority: int = 0) -> Sequence:
    request = Request(
        request_id=str(number),
        prompt_ids=[1] * num_tokens,
        params=SamplingParams(),
        arrival_s=float(number),
        seed=0,
        max_tokens=1,
        stop_ids=frozenset(),
        priority=priority,
        client=client,
    )
    return Sequence(number, request, 0, list(request.prompt_ids))


def take_next(queue: WaitingQueue) -> Sequence:
    seq = queue.peek()
    assert seq is not None
    queue.take(seq)
    return seq


def drained(queue: WaitingQueue) -> list[int]:
    order = []
    while len(queue):
        order.append(take_next(queue).seq_id)
    return order


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 2)), max_size=20), st.booleans())
def test_everyone_is_served_once_and_each_client_in_its_own_order(asked, use_priority):
    queue = WaitingQueue(use_priority=use_priority)
    sequences = [sequence(i, client, size, priority) for i, (client, size, priority) in enumerate(asked)]
    for seq in sequences:
        queue.push(seq)
    assert len(queue) == len(asked)
    order = drained(queue)
    assert sorted(order) == list(range(len(asked))) and len(queue) == 0
    for client in range(4):
        own = [sequences[i] for i in order if asked[i][0] == client]
        assert own == sorted(own, key=queue.key)
    if use_priority:
        assert [asked[i][2] for i in order] == sorted(priority for _, _, priority in asked)
    if len({client for client, _, _ in asked}) == 1 and not use_priority:
        assert order == list(range(len(asked)))


def test_turns_go_by_tokens_not_by_requests():
    queue = WaitingQueue(use_priority=False)
    for i in range(4):
        queue.push(sequence(i, client=1, num_tokens=100))
    for i in range(4, 44):
        queue.push(sequence(i, client=2, num_tokens=10))
    served = drained(queue)[:24]
    tokens_of_1 = 100 * sum(i < 4 for i in served)
    assert abs(tokens_of_1 - 10 * sum(i >= 4 for i in served)) <= 100


def test_nobody_saves_up_turns_and_outputs_count():
    queue = WaitingQueue(use_priority=False)
    for i in range(10):
        queue.push(sequence(i, client=1))
    for _ in range(5):
        take_next(queue)
    queue.charge(1, 1000)  # what it generated
    queue.push(sequence(10, client=2))
    queue.push(sequence(11, client=2))
    assert drained(queue)[:2] == [10, 11]


def test_a_preempted_sequence_goes_first_whoever_was_served_less():
    queue = WaitingQueue(use_priority=False)
    queue.push(sequence(0, client=1))
    queue.push(sequence(1, client=1))
    first = take_next(queue)
    queue.charge(1, 1000)
    queue.push(sequence(2, client=2))
    first.num_preemptions = 1
    queue.push(first)
    assert drained(queue) == [0, 2, 1]
