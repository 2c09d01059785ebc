//! The tools of a chat request.

use crate::serve::{
    api::{
        Form,
        chat::{AllowedMode, ChatRequest, Function, NamedFunction, NamedTool, Tool, ToolChoice, ToolMode},
    },
    app::Loaded,
    error::ApiError,
    grammar::{self, Grammar, references},
    tools::{Otherwise, ToolFormat, ToolParser},
};
use serde_json::Value;

/// The most tools of a request.
const MAX_TOOLS: usize = 128;
/// The most characters of a tool's name.
const MAX_NAME: usize = 128;

/// The tools that the model may call, and whether it has to.
pub(crate) struct RequestedTools {
    all: Vec<Tool>,
    format: ToolFormat,
    /// Whether the chat template knows tools; otherwise the system message describes them.
    in_template: bool,
    /// The indices of the tools of which one has to be called; `None` if the model decides.
    required: Option<Vec<usize>>,
    /// Whether an answer may call several tools.
    several: bool,
}

/// Checks that the schema of a tool's arguments is one of objects. If it allows other types too, these are taken out: arguments are always
/// an object.
fn check_parameters(index: usize, parameters: Option<&mut Value>) -> Result<(), ApiError> {
    let Some(parameters) = parameters else { return Ok(()) };
    let is_of_objects = match parameters.as_object_mut().map(|schema| schema.get_mut("type")) {
        None => false,
        Some(None) => true,
        Some(Some(kind)) => {
            if kind.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "object")) {
                *kind = "object".into();
            }
            kind == "object"
        }
    };
    if is_of_objects {
        return Ok(());
    }
    let field = format!("tools[{index}].function.parameters");
    Err(ApiError::field(field, "must be a JSON schema of the type object"))
}

impl RequestedTools {
    /// The tools of a request; `None` if there are none, or none may be called.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub(super) fn of(request: &ChatRequest, loaded: &Loaded) -> Result<Option<Self>, ApiError> {
        let mut all = request.tools.clone().unwrap_or_default();
        let choice = request.tool_choice.clone();
        if all.is_empty() {
            return match choice {
                None | Some(ToolChoice::Mode(ToolMode::None | ToolMode::Auto)) => Ok(None),
                Some(ToolChoice::Named(NamedTool::AllowedTools { allowed_tools }))
                    if allowed_tools.mode == AllowedMode::Auto && allowed_tools.tools.is_empty() =>
                {
                    Ok(None)
                }
                Some(_) => Err(ApiError::field("tool_choice", "there are no tools to call")),
            };
        }
        if all.len() > MAX_TOOLS {
            return Err(ApiError::field("tools", format!("at most {MAX_TOOLS}")));
        }
        for (index, Tool::Function { function }) in all.iter_mut().enumerate() {
            check_name(index, &function.name)?;
            check_parameters(index, function.parameters.as_mut())?;
        }
        let unknown = |name: &str| ApiError::field("tool_choice", format!("there is no tool {name:?}"));
        // Only the allowed tools are shown to the model.
        if let Some(ToolChoice::Named(NamedTool::AllowedTools { allowed_tools })) = &choice {
            let mut allowed = Vec::new();
            for NamedFunction::Function { function } in &allowed_tools.tools {
                let known = |tool: &&Tool| matches!(tool, Tool::Function { function: known } if known.name == function.name);
                allowed.push(all.iter().find(known).ok_or_else(|| unknown(&function.name))?.clone());
            }
            if allowed.is_empty() {
                return match allowed_tools.mode {
                    AllowedMode::Auto => Ok(None),
                    AllowedMode::Required => {
                        Err(ApiError::field("tool_choice", "no tool is allowed, but one is required"))
                    }
                };
            }
            all = allowed;
        }
        let named = |name: &str| all.iter().position(|Tool::Function { function }| function.name == name);
        let required = match choice {
            Some(ToolChoice::Mode(ToolMode::None)) => return Ok(None),
            None | Some(ToolChoice::Mode(ToolMode::Auto)) => None,
            Some(ToolChoice::Mode(ToolMode::Required)) => Some((0..all.len()).collect()),
            Some(ToolChoice::Named(NamedTool::Function { function })) => {
                Some(vec![named(&function.name).ok_or_else(|| unknown(&function.name))?])
            }
            Some(ToolChoice::Named(NamedTool::AllowedTools { allowed_tools })) => match allowed_tools.mode {
                AllowedMode::Auto => None,
                AllowedMode::Required => Some((0..all.len()).collect()),
            },
        };
        let known = loaded.tool_format()?;
        let several = request.parallel_tool_calls.unwrap_or(true);
        Ok(Some(Self {
            all,
            format: known.unwrap_or(ToolFormat::Hermes),
            in_template: known.is_some(),
            required,
            several,
        }))
    }

    /// Whether the chat template knows tools.
    pub(super) fn are_in_template(&self) -> bool {
        self.in_template
    }

    /// All tools, for the chat template.
    pub(super) fn all(&self) -> &[Tool] {
        &self.all
    }

    /// The grammar of answers: calls only, if a call is required; otherwise calls or an answer of the given form. `None` if the
    /// model may write anything.
    ///
    /// # Errors
    /// If the schema of a tool, or the form, cannot be followed.
    pub(super) fn grammar(&self, form: Option<&Form>, loaded: &Loaded) -> Result<Option<Grammar>, ApiError> {
        let is_strict =
            |tool: &Tool| matches!(tool, Tool::Function { function } if function.strict == Some(true));
        let form = form.map(grammar::rule).transpose()?.flatten();
        let otherwise = match (&self.required, form) {
            (Some(_), _) => Otherwise::Nothing,
            (None, Some(rule)) => Otherwise::Form(rule),
            (None, None) if self.all.iter().any(is_strict) => Otherwise::Text,
            (None, None) => return Ok(None),
        };
        let indices = self.required.clone().unwrap_or_else(|| (0..self.all.len()).collect());
        let function = |index: usize| {
            let Tool::Function { function } = &self.all[index];
            let mut function: Function = function.clone();
            // Without a required call, and without `strict`, any arguments are accepted.
            if self.required.is_none() && function.strict != Some(true) {
                function.parameters = Some(serde_json::json!({"type": "object"}));
            }
            function
        };
        let functions: Vec<Function> = indices.into_iter().map(function).collect();
        for function in &functions {
            let checked = function.parameters.as_ref().map_or(Ok(()), references::check);
            checked.map_err(|message| ApiError::field("tools", format!("{}: {message}", function.name)))?;
        }
        let functions: Vec<&Function> = functions.iter().collect();
        // A tool that is named is called once.
        let several = self.several && (self.required.is_none() || functions.len() > 1);
        let grammar = self.format.grammar(&functions, several, &otherwise, loaded.tokenizer()?);
        Grammar::lark(grammar, loaded, "tools").map(Some)
    }

    /// Whether an answer has to call a tool.
    pub(super) fn requires_call(&self) -> bool {
        self.required.is_some()
    }

    /// A parser that finds the calls in one answer.
    pub(super) fn parser(&self) -> ToolParser {
        let functions = self.all.iter().map(|Tool::Function { function }| function.clone()).collect();
        let limit = if self.several { usize::MAX } else { 1 };
        ToolParser::new(self.format, functions, limit)
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
