//! The tools of a chat request.

use crate::serve::{
    api::chat::{ChatRequest, Function, NamedTool, Tool, ToolChoice, ToolMode},
    app::Loaded,
    error::ApiError,
    grammar::Grammar,
    tools::{ToolFormat, ToolParser},
};

/// The most tools of a request.
const MAX_TOOLS: usize = 128;
/// The most characters of a tool's name.
const MAX_NAME: usize = 64;

/// The tools that the model may call, and whether it has to.
pub(super) struct RequestedTools {
    all: Vec<Tool>,
    format: ToolFormat,
    /// The indices of the tools of which one has to be called; `None` if the model decides.
    required: Option<Vec<usize>>,
    /// Whether an answer may call several tools.
    several: bool,
}

impl RequestedTools {
    /// The tools of a request; `None` if there are none, or none may be called.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub(super) fn of(request: &ChatRequest, loaded: &Loaded) -> Result<Option<Self>, ApiError> {
        let all = request.tools.clone().unwrap_or_default();
        let choice = request.tool_choice.clone();
        if all.is_empty() {
            return match choice {
                None | Some(ToolChoice::Mode(ToolMode::None | ToolMode::Auto)) => Ok(None),
                Some(_) => Err(ApiError::field("tool_choice", "there are no tools to call")),
            };
        }
        if all.len() > MAX_TOOLS {
            return Err(ApiError::field("tools", format!("at most {MAX_TOOLS}")));
        }
        for (index, Tool::Function { function }) in all.iter().enumerate() {
            check_name(index, &function.name)?;
        }
        let named = |name: &str| all.iter().position(|Tool::Function { function }| function.name == name);
        let required = match choice {
            Some(ToolChoice::Mode(ToolMode::None)) => return Ok(None),
            None | Some(ToolChoice::Mode(ToolMode::Auto)) => None,
            Some(ToolChoice::Mode(ToolMode::Required)) => Some((0..all.len()).collect()),
            Some(ToolChoice::Named(NamedTool::Function { function })) => {
                let unknown =
                    || ApiError::field("tool_choice", format!("there is no tool {:?}", function.name));
                Some(vec![named(&function.name).ok_or_else(unknown)?])
            }
        };
        if required.is_none()
            && let Some(index) =
                all.iter().position(|Tool::Function { function }| function.strict == Some(true))
        {
            let message = "arguments are held to the schema only where a call is required: set tool_choice";
            return Err(ApiError::field(format!("tools[{index}].function.strict"), message));
        }
        let format = loaded.tool_format()?.ok_or_else(|| {
            ApiError::field(
                "tools",
                "the model's chat template knows no tools; --chat-template gives it another",
            )
        })?;
        Ok(Some(Self { all, format, required, several: request.parallel_tool_calls.unwrap_or(true) }))
    }

    /// All tools, for the chat template.
    pub(super) fn all(&self) -> &[Tool] {
        &self.all
    }

    /// The grammar that restricts answers to tool calls, if a call is required.
    ///
    /// # Errors
    /// If the schema of a tool cannot be followed.
    pub(super) fn grammar(&self, loaded: &Loaded) -> Result<Option<Grammar>, ApiError> {
        let Some(required) = &self.required else { return Ok(None) };
        let functions: Vec<&Function> = required
            .iter()
            .map(|index| &self.all[*index])
            .map(|Tool::Function { function }| function)
            .collect();
        // A tool that is named is called once.
        let several = self.several && functions.len() > 1;
        Grammar::lark(self.format.grammar(&functions, several), loaded, "tools").map(Some)
    }

    /// A parser that finds the calls in one answer.
    pub(super) fn parser(&self) -> ToolParser {
        let names = self.all.iter().map(|Tool::Function { function }| function.name.clone()).collect();
        let limit = if self.several { usize::MAX } else { 1 };
        ToolParser::new(self.format, names, limit)
    }
}

fn check_name(index: usize, name: &str) -> Result<(), ApiError> {
    let allowed = |character: char| character.is_ascii_alphanumeric() || "_-.".contains(character);
    if (1..=MAX_NAME).contains(&name.len()) && name.chars().all(allowed) {
        return Ok(());
    }
    let rule = format!("must be 1 to {MAX_NAME} letters, digits, _, - or .");
    Err(ApiError::field(format!("tools[{index}].function.name"), rule))
}
