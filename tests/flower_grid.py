"""A federation of Flower's in this process: its Grid, with nodes that answer by apps, lose messages, leave and come back."""

import collections
import contextlib
import itertools
import random

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from numpyro_pvi.flower import _app
from numpyro_pvi.flower._messages import pack, unpack
from numpyro_pvi.wire import kind_of

NODE_UNAVAILABLE, CRASHED = 5, 8
with contextlib.suppress(ImportError):
    # Who sends messages; set by Flower where it runs a ServerApp.
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


class Node:
    """One node: its app, its config, and its state, which is bytes between two messages."""

    def __init__(self, app, label):
        self.app, self.config, self.state = app, {"label": label}, {}

    def context(self, run, node):
        records = {name: ConfigRecord(dict(fields)) for name, fields in self.state.items()}
        return Context(run, node, self.config, RecordDict(records), {})

    def keep(self, context):
        self.state = {name: dict(record) for name, record in context.state.items()}


class Fake(Grid):
    """Messages are answered when answers are pulled.

    Args:
        apps: by label.
        spares: makes a client of a label; where it is given, every message is answered by another one, which has nothing but the
            node's state, as in a process of its own. They are made beforehand: one process makes none while it is at a program.
        loses: share of answers that are lost, after the client has made them.
    """

    def __init__(self, apps, spares=None, loses=0.0):
        self._ids, self._random = itertools.count(1), random.Random(0)
        self.nodes = {next(self._ids): Node(app, label) for label, app in apps.items()}
        self.loses = loses
        self.spares = {} if spares is None else {label: [spares(label) for _ in range(60)] for label in apps}
        self.waiting, self.seen, self.clients = {}, [], 0
        # What happens to a question in place of its answer: by label, kind and how many of them there were before, a function of
        # this grid and the message.
        self.events, self._heard = {}, collections.Counter()

    def node_of(self, label):
        return next(i for i, node in self.nodes.items() if node.config["label"] == label)

    def come_back(self, label, keeps_state=False):
        """A node leaves, and one of the same label comes under another id."""
        left = self.nodes.pop(self.node_of(label))
        node = Node(left.app, label)
        if keeps_state:
            node.state = left.state
        self.nodes[1000] = node

    def prepare(self, label):
        """Has the process of a node that is to come back load its rows."""
        message = Message(pack(None), 1000, "query.pvi")
        self.nodes[self.node_of(label)].app(message, Node(None, label).context(1, 1000))

    # ------------------------------------------------------------------ Flower's Grid

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            if message.metadata.dst_node_id in self.nodes:
                message.metadata.__dict__["_message_id"] = f"m{next(self._ids)}"
                self.waiting[message.metadata.message_id] = message
                ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids):
        found = []
        for name in sorted(set(message_ids) & self.waiting.keys(), key=lambda m: int(m[1:])):
            message = self.waiting.pop(name)
            self.seen.append(message)
            event = self._event(message)
            answer = event(self, message) if event is not None else self.answer(message)
            if answer is not None and self._random.random() >= self.loses:
                found.append(answer)
        return found

    def _event(self, message):
        node, data = self.nodes.get(message.metadata.dst_node_id), unpack(message.content)
        if node is None or data is None:
            return None
        of = node.config["label"], kind_of(data)
        self._heard[of] += 1
        return self.events.pop((*of, self._heard[of] - 1), None)

    def answer(self, message):
        """The reply of the node that a message is for; an error in Flower's words where it has left."""
        node = self.nodes.get(message.metadata.dst_node_id)
        if node is None:
            return Message(Error(NODE_UNAVAILABLE, "it has left"), reply_to=message)
        context = node.context(1, message.metadata.dst_node_id)
        if self.spares:
            spare = self.spares[node.config["label"]].pop()
            for key in [key for key in _app._LIVING if key[1] == message.metadata.dst_node_id]:
                _app._LIVING[key] = 1, spare, spare.save()
        reply = node.app(message, context)
        node.keep(context)
        self.seen.append(reply)
        return reply
