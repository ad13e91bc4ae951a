"""Requests that users make through their daemons: models, invitations, members, pairing."""

import asyncio
from collections.abc import Callable

from molink.errors import NotAuthorized, RequestError
from molink.swarm.controller.desired_state import (
    decode_desired_models,
    describe_changes,
    resolve_desired_models,
    switch_model,
)
from molink.swarm.controller.events import (
    ControllerEvent,
    DesiredStateChangedEvent,
    MemberAddedEvent,
    MemberRemovedEvent,
    RebalanceRequestedEvent,
)
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.records import DesiredModel, MemberRecord, Standing
from molink.swarm.membership.invitations import encode_invitations
from molink.swarm.membership.join_token import JoinToken
from molink.swarm.membership.sanitize import is_valid_model_name
from molink.wire.messages.admin import (
    ApplyModels,
    ApplyReply,
    InvitationsReply,
    InvitationsRequest,
    InviteReply,
    InviteRequest,
    PairingDecisionReply,
    PairingDecisionRequest,
    Rebalance,
    RevokeReply,
    RevokeRequest,
    ServeModel,
    StopServing,
    SwitchModel,
    UnrevokeRequest,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.control_plane import DoneReply
from molink.wire.messages.instructions import Revoked
from molinkd.coordinator.connections import PeerConnections
from molinkd.coordinator.membership import Membership, is_invitation_id
from molinkd.coordinator.pairing_service import PairingService
from molinkd.coordinator.state_store import StateStore

#: Requests handled here.
AdminRequest = (
    ServeModel
    | ApplyModels
    | StopServing
    | SwitchModel
    | Rebalance
    | InviteRequest
    | InvitationsRequest
    | RevokeRequest
    | UnrevokeRequest
    | PairingDecisionRequest
)
AdminReply = (
    DoneReply | ApplyReply | InviteReply | InvitationsReply | RevokeReply | PairingDecisionReply
)

#: Seconds to deliver a reply before connections are closed.
_DISCONNECT_DELAY = 0.2
#: Members named in a reply.
_MAX_NAMED = 8


class AdminHandler:
    """Handles the requests of members and owners."""

    def __init__(
        self,
        swarm: str,
        state: StateStore,
        membership: Membership,
        fleet: Fleet,
        connections: PeerConnections,
        dispatch_event: Callable[[ControllerEvent], None],
        token: Callable[[str, int], JoinToken],
        pairing: PairingService,
    ) -> None:
        """``token`` makes a token from an invitation's secret key and expiry."""
        self._swarm = swarm
        self._state, self._membership, self._fleet = state, membership, fleet
        self._connections, self._dispatch_event, self._make_token = (
            connections,
            dispatch_event,
            token,
        )
        self._pairing = pairing

    def handle_request(
        self, peer: str, request: AdminRequest, payload: memoryview | None
    ) -> tuple[AdminReply, bytes | None]:
        """Carry out a request of ``peer``; returns the reply and its payload.

        Raises:
            NotAuthorized: ``peer`` may not make this request.
            RequestError: it is invalid.
        """
        match request:
            case ServeModel():
                return self._serve_model(peer, request), None
            case ApplyModels():
                return self._apply_models(peer, request, payload)
            case StopServing():
                return self._stop_serving(peer, request), None
            case SwitchModel():
                return self._switch_model(peer, request), None
            case Rebalance():
                return self._rebalance(peer, request), None
            case InviteRequest():
                return self._create_invitation(peer, request), None
            case InvitationsRequest():
                text = encode_invitations(self._membership.list_invitations(peer), self._name_of)
                return InvitationsReply(ref=request.ref, payload=Payload("u8", (len(text),))), text
            case RevokeRequest():
                return self._revoke_target(peer, request), None
            case UnrevokeRequest():
                self._check_owner(peer)
                self._readmit_member(request.target)
                return DoneReply(ref=request.ref), None
            case PairingDecisionRequest():
                return self._decide_pairing(peer, request), None

    def _decide_pairing(self, peer: str, request: PairingDecisionRequest) -> PairingDecisionReply:
        name = self._pairing.decide_request(request.code, peer, refuse=request.refuse)
        return PairingDecisionReply(ref=request.ref, name=name)

    def remove_member(self, peer: str, standing: Standing) -> list[MemberRecord]:
        """Remove a PC with its further devices.

        Returns the members that joined by an ended invitation, and stay.
        """
        kept_peers: list[MemberRecord] = []
        for one in (peer, *self._membership.list_devices(peer)):
            if self._membership.records[one].standing != "member":
                continue
            if standing == "revoked":
                self._connections.send_to_peer(one, Revoked(swarm=self._swarm))
            kept_peers += self._membership.remove_member(one, standing)
            self._connections.drop_peer(one)
            self._dispatch_event(
                MemberRemovedEvent(one, "left" if standing == "left" else "was revoked")
            )
        return [
            one for one in kept_peers if self._membership.records[one.peer].standing == "member"
        ]

    def _readmit_member(self, peer: str) -> None:
        """Readmit a revoked PC with its further devices."""
        self._dispatch_event(MemberAddedEvent(self._membership.readmit_member(peer)))
        for one in self._membership.list_devices(peer):
            if self._membership.records[one].standing == "revoked":
                self._dispatch_event(MemberAddedEvent(self._membership.readmit_member(one)))

    def _serve_model(self, peer: str, request: ServeModel) -> DoneReply:
        applied = any(one.applied for one in self._fleet.models)
        if applied and request.is_retry:
            return DoneReply(ref=request.ref)
        self._check_may_serve(peer, request.model.name)
        if applied:
            raise RequestError(
                "the swarm's models come from a file: add the model there and `molink apply` it, "
                "or run `molink stop` first"
            )
        desired = DesiredModel(
            facts=request.model,
            source=peer,
            min_peers=request.min_peers,
            dtype=request.dtype,
            micro_batches=request.micro_batches,
            quantize=request.quantize,
            objective=request.objective,
            min_stages=request.min_stages,
        )
        self._set_models((desired,))
        return DoneReply(ref=request.ref)

    def _apply_models(
        self, peer: str, request: ApplyModels, payload: memoryview | None
    ) -> tuple[ApplyReply, bytes]:
        """Serve exactly the models of a file, or reject it; replies with the changes."""
        if not self._membership.records[peer].is_owner:
            raise NotAuthorized("only the swarm's first PC may apply a file")
        desired = decode_desired_models(payload)
        models = resolve_desired_models(desired, peer, self._fleet.registry)
        lines = describe_changes(self._fleet.models, models)
        if lines and not request.dry_run:
            self._set_models(models)
        text = "\n".join(lines).encode("utf-8")
        return ApplyReply(ref=request.ref, payload=Payload("u8", (len(text),))), text

    def _stop_serving(self, peer: str, request: StopServing) -> DoneReply:
        served = self._fleet.models
        if not served:
            raise RequestError("the swarm serves no model")
        if not self._membership.records[peer].is_owner and any(
            one.source != peer for one in served
        ):
            names = ", ".join(one.facts.name for one in served)
            raise NotAuthorized(
                f"only the swarm's first PC, or the one that loaded {names}, can unload models"
            )
        self._set_models(())
        return DoneReply(ref=request.ref)

    def _switch_model(self, peer: str, request: SwitchModel) -> DoneReply:
        by = "" if self._membership.records[peer].is_owner else peer
        models = switch_model(
            self._fleet.models, request.model, served=request.served, requester=by
        )
        self._set_models(models)
        return DoneReply(ref=request.ref)

    def _rebalance(self, peer: str, request: Rebalance) -> DoneReply:
        if not self._membership.records[peer].is_owner:
            raise NotAuthorized("only the swarm's first PC may rebalance it")
        if not self._fleet.models:
            raise RequestError("the swarm serves no model")
        self._dispatch_event(RebalanceRequestedEvent())
        return DoneReply(ref=request.ref)

    def _set_models(self, models: tuple[DesiredModel, ...]) -> None:
        self._state.save_models(models)
        self._dispatch_event(DesiredStateChangedEvent(models))

    def _check_may_serve(self, peer: str, model: str) -> None:
        """Owners decide on models; other members only if none is served, or about their own."""
        if not is_valid_model_name(model):
            raise RequestError("a model name must be printable text", param="model")
        served = self._fleet.models
        if not served or self._membership.records[peer].is_owner:
            return
        if [(one.source, one.facts.name) for one in served] != [(peer, model)]:
            names = ", ".join(one.facts.name for one in served)
            raise NotAuthorized(
                f"the swarm serves {names}; only its first PC can switch to another model (`molink "
                "run MODEL` there)"
            )

    def _create_invitation(self, peer: str, request: InviteRequest) -> InviteReply:
        secret, invitation = self._membership.create_invitation(peer, request.ttl, request.uses)
        token = self._make_token(secret, invitation.expires_at)
        return InviteReply(ref=request.ref, token=str(token), id=invitation.id)

    def _revoke_target(self, peer: str, request: RevokeRequest) -> RevokeReply:
        target = request.target
        if is_invitation_id(target):
            kept_peers = self._membership.end_invitation(target, peer)
        else:
            self._check_owner(peer)
            if target == peer or target not in self._fleet.registry.members:
                raise RequestError(f"{target} is not another member", param="target")
            kept_peers = self.remove_member(target, "revoked")
            # Its messages are ignored from now on; its connection is closed after the reply.
            for one in (target, *self._membership.list_devices(target)):
                asyncio.get_running_loop().call_later(_DISCONNECT_DELAY, self._disconnect, one)
        names = tuple(self._name_of(one.peer) for one in kept_peers)
        others = len(names[_MAX_NAMED:])
        return RevokeReply(ref=request.ref, kept_peers=names[:_MAX_NAMED], num_others=others)

    def _disconnect(self, peer: str) -> None:
        if self._membership.records[peer].standing != "member":
            self._connections.disconnect_peer(peer)

    def _check_owner(self, peer: str) -> None:
        if not self._membership.records[peer].is_owner:
            raise NotAuthorized("only the swarm's first PC may revoke")

    def _name_of(self, peer: str) -> str:
        """The name of a present or former member."""
        record = self._membership.records.get(peer)
        return peer if record is None else record.name
