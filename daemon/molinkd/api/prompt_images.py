"""Images of a conversation: decoded, cut, and put into its prompt."""

from typing import TYPE_CHECKING

from molink.checkpoint.vision import VisionConfig
from molink.errors import RequestError
from molink.facts.images import MAX_IMAGES
from molinkd.api.model_catalog import LoadedModel
from molinkd.api.openai.schema import ContentPart, ImageUrl
from molinkd.api.prompt_worker_messages import PromptTokens

if TYPE_CHECKING:
    from molink.images.cut import CutImage


class ConversationImages:
    """Collects the images of a conversation in order; a model without ``vision`` takes none."""

    def __init__(self, vision: VisionConfig | None) -> None:
        self._vision = vision
        self.cuts: list[CutImage] = []

    def add_image(self, part: ContentPart, field: str) -> None:
        """Decode and cut an image; ``field`` names its part in errors.

        Raises:
            RequestError: the model takes no images, or not this one.
        """
        image = part.image_url
        image = ImageUrl(image) if isinstance(image, str) else image or ImageUrl()
        if self._vision is None:
            where = image.type_field or f"{field}.type"
            raise RequestError(f"`{where}`: this model takes no images, only text", where)
        if len(self.cuts) >= MAX_IMAGES:
            raise RequestError(f"`messages`: at most {MAX_IMAGES} images", "messages")
        # Pillow is loaded with the first image.
        from molink.images.cut import cut_image
        from molink.images.decode import decode_data_url

        decoded = decode_data_url(image.url, image.field or f"{field}.image_url")
        self.cuts.append(cut_image(decoded, self._vision, low_detail=image.detail == "low"))

    def encode_prompt(self, text: str, tail: str, loaded_model: LoadedModel) -> PromptTokens:
        """Encode a rendered prompt; raises as :func:`molink.images.prompt.encode_prompt`."""
        from molink.images.prompt import encode_prompt

        assert self._vision is not None
        tokenizer, token = loaded_model.tokenizer, self._vision.rules.token
        image_id = tokenizer.find_token_id(token)
        ids, images = encode_prompt(
            text,
            self.cuts,
            self._vision,
            -1 if image_id is None else image_id,
            lambda shown: tokenizer.encode(shown, special=False),
        )
        return PromptTokens(tuple(ids), tail=tail, images=images)
