"""What people ask of the swarm through their daemons: what is served, who is let in or shut out."""

import asyncio
from collections.abc import Callable

from molink.errors import NotAuthorized, RequestError
from molink.swarm.controller.events import Event, MemberAdded, MemberRemoved, Rebalanced, Serve
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.records import Desired, MemberRecord, Standing
from molink.swarm.controller.wishes import changes, decode_wishes, fulfil, switched
from molink.swarm.membership.hygiene import is_model_name
from molink.swarm.membership.invitations import encode_invitations
from molink.swarm.membership.token import JoinToken
from molink.wire.messages.base import Payload
from molink.wire.messages.control import Done
from molink.wire.messages.instructions import Revoked
from molink.wire.messages.requests import (
    Applied,
    ApplyModels,
    InvitationsReply,
    InvitationsRequest,
    Invite,
    InviteRequest,
    JudgeReply,
    JudgeRequest,
    Rebalance,
    RevokeReply,
    RevokeRequest,
    ServeModel,
    StopServing,
    SwitchModel,
    UnrevokeRequest,
)
from molinkd.coordinator.connections import PeerConnections
from molinkd.coordinator.door import Door, is_invitation
from molinkd.coordinator.reception import Reception
from molinkd.coordinator.state import State

#: What is answered here.
Order = (
    ServeModel
    | ApplyModels
    | StopServing
    | SwitchModel
    | Rebalance
    | InviteRequest
    | InvitationsRequest
    | RevokeRequest
    | UnrevokeRequest
    | JudgeRequest
)
Answer = Done | Applied | Invite | InvitationsReply | RevokeReply | JudgeReply

#: Until an answer is out, before connections are cut, in seconds.
_CUT_DELAY = 0.2
#: Members that are named in an answer.
_NAMED = 8


class Administration:
    """Answers what members and owners ask, and has it happen."""

    def __init__(
        self,
        swarm: str,
        state: State,
        door: Door,
        fleet: Fleet,
        connections: PeerConnections,
        happened: Callable[[Event], None],
        token: Callable[[str, int], JoinToken],
        reception: Reception,
    ) -> None:
        """``swarm`` is its id.

        ``token`` makes one of an invitation's secret key and the time when it expires.
        """
        self._swarm = swarm
        self._state, self._door, self._fleet = state, door, fleet
        self._connections, self._happened, self._token = connections, happened, token
        self._reception = reception

    def answer(
        self, peer: str, order: Order, payload: memoryview | None
    ) -> tuple[Answer, bytes | None]:
        """Do what ``peer`` asks; returns the answer and its payload.

        Raises:
            NotAuthorized: another one may ask for it, but not ``peer``.
            RequestError: it can't be done; says why.
        """
        match order:
            case ServeModel():
                return self._serve(peer, order), None
            case ApplyModels():
                return self._apply(peer, order, payload)
            case StopServing():
                return self._stop(peer, order), None
            case SwitchModel():
                return self._switch(peer, order), None
            case Rebalance():
                return self._rebalance(peer, order), None
            case InviteRequest():
                return self._invite(peer, order), None
            case InvitationsRequest():
                text = encode_invitations(self._door.listed(peer), self._name)
                return InvitationsReply(ref=order.ref, payload=Payload("u8", (len(text),))), text
            case RevokeRequest():
                return self._revoke(peer, order), None
            case UnrevokeRequest():
                self._check_owner(peer)
                self._readmit(order.target)
                return Done(ref=order.ref), None
            case JudgeRequest():
                return self._judge(peer, order), None

    def _judge(self, peer: str, order: JudgeRequest) -> JudgeReply:
        name = self._reception.judge(order.code, peer, refuse=order.refuse)
        return JudgeReply(ref=order.ref, name=name)

    def dismiss(self, peer: str, standing: Standing) -> list[MemberRecord]:
        """A PC is no member any more; returns those who came by an invitation that ended.

        With it go its further devices.
        """
        stayed: list[MemberRecord] = []
        for one in (peer, *self._door.devices(peer)):
            if self._door.records[one].standing != "member":
                continue
            if standing == "revoked":
                self._connections.tell(one, Revoked(swarm=self._swarm))
            stayed += self._door.dismiss(one, standing)
            self._connections.forget(one)
            self._happened(MemberRemoved(one, "left" if standing == "left" else "was revoked"))
        return [one for one in stayed if self._door.records[one.peer].standing == "member"]

    def _readmit(self, peer: str) -> None:
        """A revoked PC is a member again, with its further devices."""
        self._happened(MemberAdded(self._door.readmit(peer)))
        for one in self._door.devices(peer):
            if self._door.records[one].standing == "revoked":
                self._happened(MemberAdded(self._door.readmit(one)))

    def _serve(self, peer: str, order: ServeModel) -> Done:
        applied = any(one.applied for one in self._fleet.models)
        if applied and order.again:
            return Done(ref=order.ref)
        self._check_model(peer, order.model.name)
        if applied:
            raise RequestError(
                "what the swarm serves is written in a file: add the model to it and `molink "
                "apply` it, or `molink stop` first"
            )
        desired = Desired(
            facts=order.model,
            source=peer,
            min_peers=order.min_peers,
            dtype=order.dtype,
            micro_batches=order.micro_batches,
            quantize=order.quantize,
            objective=order.objective,
            min_stages=order.min_stages,
        )
        self._have_served((desired,))
        return Done(ref=order.ref)

    def _apply(
        self, peer: str, order: ApplyModels, payload: memoryview | None
    ) -> tuple[Applied, bytes]:
        """Serve what a file names, all of it or nothing; says what that changes."""
        if not self._door.records[peer].owner:
            raise NotAuthorized("only the swarm's first PC may apply a file")
        wishes = decode_wishes(payload)
        models = fulfil(wishes, peer, self._fleet.registry)
        lines = changes(self._fleet.models, models)
        if lines and not order.dry:
            self._have_served(models)
        text = "\n".join(lines).encode("utf-8")
        return Applied(ref=order.ref, payload=Payload("u8", (len(text),))), text

    def _stop(self, peer: str, order: StopServing) -> Done:
        served = self._fleet.models
        if not served:
            raise RequestError("the swarm serves no model")
        if not self._door.records[peer].owner and any(one.source != peer for one in served):
            names = ", ".join(one.facts.name for one in served)
            raise NotAuthorized(
                f"only the swarm's first PC, or the one that brought {names}, can have it stop"
            )
        self._have_served(())
        return Done(ref=order.ref)

    def _switch(self, peer: str, order: SwitchModel) -> Done:
        by = "" if self._door.records[peer].owner else peer
        models = switched(self._fleet.models, order.model, served=order.served, by=by)
        self._have_served(models)
        return Done(ref=order.ref)

    def _rebalance(self, peer: str, order: Rebalance) -> Done:
        if not self._door.records[peer].owner:
            raise NotAuthorized("only the swarm's first PC may have all models placed anew")
        if not self._fleet.models:
            raise RequestError("the swarm serves no model")
        self._happened(Rebalanced())
        return Done(ref=order.ref)

    def _have_served(self, models: tuple[Desired, ...]) -> None:
        self._state.save_models(models)
        self._happened(Serve(models))

    def _check_model(self, peer: str, model: str) -> None:
        """Owners decide what is served; another member only where nothing is, or again its own."""
        if not is_model_name(model):
            raise RequestError("a model's name has to be printable text", param="model")
        served = self._fleet.models
        if not served or self._door.records[peer].owner:
            return
        if [(one.source, one.facts.name) for one in served] != [(peer, model)]:
            names = ", ".join(one.facts.name for one in served)
            raise NotAuthorized(
                f"the swarm serves {names}; only its first PC can have it serve another model "
                "(`molink run MODEL` there)"
            )

    def _invite(self, peer: str, order: InviteRequest) -> Invite:
        secret, invitation = self._door.invite(peer, order.ttl, order.uses)
        token = self._token(secret, invitation.expires)
        return Invite(ref=order.ref, token=str(token), id=invitation.id)

    def _revoke(self, peer: str, order: RevokeRequest) -> RevokeReply:
        target = order.target
        if is_invitation(target):
            stayed = self._door.end_invitation(target, peer)
        else:
            self._check_owner(peer)
            if target == peer or target not in self._fleet.registry.members:
                raise RequestError(f"{target} is no other member", param="target")
            stayed = self.dismiss(target, "revoked")
            # Nothing that it sends counts any more; its connection is cut once this is answered.
            for one in (target, *self._door.devices(target)):
                asyncio.get_running_loop().call_later(_CUT_DELAY, self._cut, one)
        names = tuple(self._name(one.peer) for one in stayed)
        others = len(names[_NAMED:])
        return RevokeReply(ref=order.ref, stayed=names[:_NAMED], others=others)

    def _cut(self, peer: str) -> None:
        if self._door.records[peer].standing != "member":
            self._connections.cut(peer)

    def _check_owner(self, peer: str) -> None:
        if not self._door.records[peer].owner:
            raise NotAuthorized("only the swarm's first PC may revoke")

    def _name(self, peer: str) -> str:
        """What people call a peer that is a member, or was one."""
        record = self._door.records.get(peer)
        return peer if record is None else record.name
