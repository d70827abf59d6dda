"""A federation of Flower's in this process, by whose Grid all that a server sends and sees goes, and clients drop out."""

import contextlib

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid

with contextlib.suppress(ImportError):
    # Who sends messages; set by Flower where it runs a ServerApp.
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

GONE = 5


class Recorded(Grid):
    """Nodes answer where they are asked.

    Args:
        apps: by label.

    Attributes:
        seen: of every reply that has reached the server its stage and its bytes.
        faults: of sums to come, the first of them first: by stage, labels that do not hear it, or ("lost", label) of a lost reply.
    """

    def __init__(self, apps):
        self.nodes = {
            100 + i: (label, app, Context(1, 100 + i, {}, RecordDict(), {}))
            for i, (label, app) in enumerate(apps.items())
        }
        self.seen, self.faults, self.now = [], [], {}

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        raise NotImplementedError

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        stage = messages[0].content.config_records.get(RECORD_KEY_CONFIGS, {}).get(Key.STAGE)
        if stage == Stage.SETUP:
            self.now = self.faults.pop(0) if self.faults else {}
        found = []
        for message in messages:
            label, app, context = self.nodes[message.metadata.dst_node_id]
            gone = self.now.get(stage, ())
            error = Message(Error(GONE, "it has left"), reply_to=message)
            if label in gone:
                found.append(error)
                continue
            try:
                # Through bytes, as over a network: the mod takes a message apart, of which others would be made.
                reply = message_from_proto(
                    message_to_proto(app(message_from_proto(message_to_proto(message)), context))
                )
            except Exception as failed:
                reply = Message(Error(8, str(failed)), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
            found.append(error if ("lost", label) in gone else reply)
        self.seen += [(stage, message_to_proto(x).SerializeToString()) for x in found if not x.has_error()]
        return found
