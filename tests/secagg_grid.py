"""A federation of Flower's in this process, by whose Grid all that a server sends and sees in a sum goes, and clients drop out."""

from flwr.app import Error, Message
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.serde import message_from_proto, message_to_proto

from tests.flower_grid import CRASHED, NODE_UNAVAILABLE, Fake


def through_bytes(message):
    """As over a network: the mod takes a message apart, of which others would be made."""
    return message_from_proto(message_to_proto(message))


class Recorded(Fake):
    """Nodes answer where they are asked.

    Args:
        apps: by label.

    Attributes:
        replies: of every reply that has reached the server its stage and its bytes.
        faults: of sums to come, the first of them first: by stage, labels that do not hear it, or ("lost", label) of a lost reply.
    """

    def __init__(self, apps):
        super().__init__(apps)
        self.replies, self.faults, self.now = [], [], {}

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if stage_of(messages[0]) == Stage.SETUP:
            self.now = self.faults.pop(0) if self.faults else {}
        return super().send_and_receive(messages, timeout=timeout)

    def answer(self, message):
        stage, node = stage_of(message), message.metadata.dst_node_id
        gone, label = self.now.get(stage, ()), self.nodes[node].config["label"]
        reply = None
        if label not in gone:
            try:
                reply = through_bytes(super().answer(through_bytes(message)))
            except Exception as failed:
                reply = Message(Error(CRASHED, str(failed)), reply_to=message)
        if reply is None or ("lost", label) in gone:
            reply = Message(Error(NODE_UNAVAILABLE, "it has left"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = node
        if not reply.has_error():
            self.replies.append((stage, message_to_proto(reply).SerializeToString()))
        return reply


def stage_of(message):
    """Of the protocol; None outside of it."""
    return message.content.config_records.get(RECORD_KEY_CONFIGS, {}).get(Key.STAGE)
