"""Messages to tokens and back, by the model's chat template."""

from rollmill.data.renderer.renderer import RenderedPrompt, Renderer, load_renderer, renderer_of
from rollmill.data.renderer.template import ChatMessage, Switches

__all__ = ["ChatMessage", "RenderedPrompt", "Renderer", "Switches", "load_renderer", "renderer_of"]
