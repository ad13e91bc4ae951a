"""Requests that users make through their daemons: models, invitations, members, pairing."""

import asyncio
from collections.abc import Callable, Iterable

from molink.errors import ModelNotFound, NotAuthorized, RequestError
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
from molink.swarm.controller.records import DesiredModel
from molink.swarm.membership.invitations import encode_invitations
from molink.swarm.membership.sanitize import is_valid_model_name
from molink.wire.messages.admin import (
    AppendEntries,
    ApplyModels,
    ApplyReply,
    InvitationsReply,
    InvitationsRequest,
    LogReply,
    LogRequest,
    PairingDecisionReply,
    PairingDecisionRequest,
    Rebalance,
    ServeModel,
    StopServing,
    SwitchModel,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.control_plane import DoneReply
from molink.wire.messages.membership import AdmissionEntry, peer_of_key
from molinkd.coordinator.connections import PeerConnections
from molinkd.coordinator.membership import Membership, MembershipChange
from molinkd.coordinator.pairing_service import PairingService
from molinkd.coordinator.state_store import StateStore

#: Requests handled here.
AdminRequest = (
    ServeModel
    | ApplyModels
    | StopServing
    | SwitchModel
    | Rebalance
    | LogRequest
    | AppendEntries
    | InvitationsRequest
    | PairingDecisionRequest
)
AdminReply = DoneReply | ApplyReply | LogReply | InvitationsReply | PairingDecisionReply

#: Seconds to deliver a reply before connections are closed.
_DISCONNECT_DELAY = 0.2
#: Members in a join token, which people have to paste.
_MAX_CONTACTS = 2


class AdminHandler:
    """Handles the requests of members and owners."""

    def __init__(
        self,
        state: StateStore,
        membership: Membership,
        fleet: Fleet,
        connections: PeerConnections,
        dispatch_event: Callable[[ControllerEvent], None],
        send_state: Callable[[Iterable[str]], None],
        addresses: Callable[[], tuple[str, ...]],
        leader: str,
        pairing: PairingService,
    ) -> None:
        """``send_state`` sends the state to peers by id.

        ``addresses`` are this coordinator's, and ``leader`` the peer on whose PC it runs.
        """
        self._state, self._membership, self._fleet = state, membership, fleet
        self._connections, self._dispatch_event = connections, dispatch_event
        self._send_state, self._pairing = send_state, pairing
        self._addresses, self._leader = addresses, leader

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
            case LogRequest():
                return self._send_log(request)
            case AppendEntries():
                self._append_entries(peer, request)
                return DoneReply(ref=request.ref), None
            case InvitationsRequest():
                text = encode_invitations(self._membership.list_invitations(peer), self._name_of)
                return InvitationsReply(ref=request.ref, payload=Payload("u8", (len(text),))), text
            case PairingDecisionRequest():
                return self._decide_pairing(request), None

    def _decide_pairing(self, request: PairingDecisionRequest) -> PairingDecisionReply:
        listener = self._pairing.require_listener()
        if request.refuse:
            return PairingDecisionReply(ref=request.ref, name=listener.refuse_joiner(request.code))
        found = listener.find_joiner(request.code)
        return PairingDecisionReply(ref=request.ref, name=found.name, verify_key=found.verify_key)

    def _send_log(self, request: LogRequest) -> tuple[LogReply, bytes]:
        registry = self._fleet.registry
        pcs = [peer for peer in registry.sessions if registry.primary_peer(peer) == peer]
        contacts = [registry.members[peer].announced for peer in pcs if peer != self._leader]
        text = self._membership.log.encode()
        reply = LogReply(
            ref=request.ref,
            payload=Payload("u8", (len(text),)),
            addresses=self._addresses(),
            contacts=tuple(one for one in contacts if one is not None and one.addresses)[
                :_MAX_CONTACTS
            ],
        )
        return reply, text

    def _append_entries(self, peer: str, request: AppendEntries) -> None:
        def append() -> None:
            self.apply_change(self._membership.append_entries(request.entries, peer))

        if not request.code:
            append()
            return
        entry = request.entries[0].decode()
        if not isinstance(entry, AdmissionEntry):
            raise RequestError("only an admission goes with a code", param="code")
        key = entry.verify_key

        def admit() -> None:
            # A PC that has lost its record of the swarm may be a member already.
            if not self._membership.log.is_member(peer_of_key(key)):
                append()

        self._pairing.require_listener().admit_joiner(request.code, key, admit)

    def apply_change(self, change: MembershipChange) -> None:
        """Tell everybody of a changed log, and let go of those that are no members any more."""
        if not change.is_new:
            return
        self._send_state(self._fleet.registry.sessions)
        for one in change.added:
            self._dispatch_event(MemberAddedEvent(one))
        for one in change.removed:
            was_revoked = one.standing == "revoked"
            if was_revoked:
                self._connections.send_to_peer(one.peer, *self._membership.prove_revoked())
                # Its messages are ignored from now on; its connection is closed after the reply.
                loop = asyncio.get_running_loop()
                loop.call_later(_DISCONNECT_DELAY, self._disconnect, one.peer)
            self._connections.drop_peer(one.peer)
            reason = "was revoked" if was_revoked else "left"
            self._dispatch_event(MemberRemovedEvent(one.peer, reason))

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
            kv_cache_dtype=request.kv_cache_dtype,
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
            raise NotAuthorized.owner_only("apply a file")
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
            raise ModelNotFound("the swarm serves no model")
        if not self._membership.records[peer].is_owner and any(
            one.source != peer for one in served
        ):
            names = ", ".join(one.facts.name for one in served)
            raise NotAuthorized.owner_only(f"unload {names}, or the PC that loaded it")
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
            raise NotAuthorized.owner_only("rebalance it")
        if not self._fleet.models:
            raise ModelNotFound("the swarm serves no model")
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
            raise NotAuthorized.owner_only(
                f"serve another model than {names} (`molink run MODEL` there)"
            )

    def _disconnect(self, peer: str) -> None:
        record = self._membership.records.get(peer)
        if record is None or record.standing != "member":
            self._connections.disconnect_peer(peer)

    def _name_of(self, peer: str) -> str:
        """The name of a present or former member."""
        record = self._membership.records.get(peer)
        return peer if record is None else record.name
