# Installs molink into .venv of this clone, or the newest release where there is no clone; with
# options, shows it at work or checks it.
# Runs in Windows PowerShell 5.1 and in PowerShell 7. Options are read by hand, so that --demo and
# -Demo both work.
$ErrorActionPreference = 'Stop'
$ProgressPreference = 'SilentlyContinue'

# Where releases are; a release's own copy of this script says it.
$Releases = ''
# Free disk space in MB that an installation takes with each build of torch, downloads included.
$NeedCpu = 3000
$NeedCuda = 8000
$NeedUpdate = 500
# Characters of this folder's path with which the longest one in .venv (torch's licences) has the 259
# that Windows takes.
$LongestRoot = 60

$Usage = @'
Usage: powershell -ExecutionPolicy Bypass -File install.ps1 [options]

Makes .venv in this clone and installs molink into it. Run it again at any time: what is
installed is kept. Without a clone it installs the newest release into
%LOCALAPPDATA%\Programs\molink.

  --demo          then start three peers on this PC with the bundled model (Ctrl-C stops them)
  --ask TEXT      with --demo: print the answer to TEXT and exit
  --test          then install what the checks need and run all of them
  --cpu, --cuda   which build of torch (default: CUDA where there is an NVIDIA driver)
  --path          put molink on your PATH (default: ask in a terminal, else leave it)
  --from URL      where releases are, without a clone
  --python PATH   which Python (default: the first that is 3.11 or newer)
  --help          this text
'@

# PowerShell has no $PSScriptRoot for what comes through a pipe.
$InClone = $PSScriptRoot -and (Test-Path -LiteralPath (Join-Path $PSScriptRoot 'pyproject.toml'))
$Root = if ($InClone) { $PSScriptRoot } else { Join-Path $env:LOCALAPPDATA 'Programs\molink' }
$Download = Join-Path $Root 'download'
$Venv = Join-Path $Root '.venv'
$VenvPython = Join-Path $Venv 'Scripts\python.exe'
$Log = Join-Path $Venv 'install.log'

function Say([string] $Text) {
    Write-Host ''
    Write-Host "== $Text"
}

function Die([string[]] $Lines) {
    Write-Host ''
    Write-Host "install.ps1: $($Lines[0])" -ForegroundColor Red
    $Lines | Select-Object -Skip 1 | ForEach-Object { Write-Host "  $_" }
    exit 1
}

function Read-Options([string[]] $Words) {
    $options = @{ Demo = $false; Ask = $null; Test = $false; Flavour = ''; From = $Releases; Python = ''; Path = $false; Help = $false }
    for ($i = 0; $i -lt $Words.Count; $i++) {
        $name = $Words[$i] -replace '^--?', ''
        switch ($name) {
            'demo' { $options.Demo = $true }
            'test' { $options.Test = $true }
            'path' { $options.Path = $true }
            'help' { $options.Help = $true }
            { $_ -in 'cpu', 'cuda' } {
                if ($options.Flavour -and $options.Flavour -ne $name) {
                    Die '--cpu and --cuda exclude each other'
                }
                $options.Flavour = $name.ToLowerInvariant()
            }
            { $_ -in 'ask', 'from', 'python' } {
                if ($i + 1 -ge $Words.Count) { Die "--$name needs a value", 'see install.ps1 --help' }
                $i++
                $options[$name] = $Words[$i]
            }
            default { Die "unknown option $($Words[$i])", 'see install.ps1 --help' }
        }
    }
    if ($null -ne $options.Ask -and -not $options.Demo) { Die '--ask goes with --demo' }
    return $options
}

# Runs a program quietly and returns its output; $null if it fails or is not there.
function Get-Output([string[]] $Command, [string[]] $Arguments) {
    $ErrorActionPreference = 'SilentlyContinue'
    $program = $Command[0]
    $all = @($Command | Select-Object -Skip 1) + $Arguments
    try { $output = & $program @all 2>$null } catch { return $null }
    if ($LASTEXITCODE -ne 0) { return $null }
    return ($output -join "`n").Trim()
}

# No double quotes in these: Windows PowerShell drops them on the way to a program.
function Get-PythonVersion([string[]] $Command) {
    return Get-Output $Command @('-c', 'import platform; print(platform.python_version())')
}

function Test-NewEnough([string] $Version) {
    return $Version -match '^3\.(\d+)\.' -and [int] $Matches[1] -ge 11
}

function Find-Python([string] $Named) {
    $hint = 'install one from https://www.python.org/downloads/ (or: winget install Python.Python.3.13)'
    if ($Named) {
        $version = Get-PythonVersion @($Named)
        if (-not $version) { Die "--python ${Named}: not a Python interpreter" }
        if (-not (Test-NewEnough $version)) {
            Die "Python is too old: $Named is $version, molink needs 3.11 or newer", $hint
        }
        return , @($Named)
    }
    $found = @()
    # `py` is the launcher that python.org's installer brings; a bare `python` may be the Store's stub.
    $candidates = @(@('py', '-3.13'), @('py', '-3.12'), @('py', '-3.11'), @('py', '-3.14'),
        @('py', '-3'), @('python'), @('python3'))
    foreach ($candidate in $candidates) {
        $version = Get-PythonVersion $candidate
        if (-not $version) { continue }
        if (Test-NewEnough $version) { return , $candidate }
        $found += "$($candidate -join ' ') is $version"
    }
    if ($found) {
        Die "Python is too old: $($found -join ', '); molink needs 3.11 or newer", $hint
    }
    Die 'there is no Python on the PATH; molink needs 3.11 or newer', $hint
}

# An explicit choice is remembered; otherwise the machine decides.
function Get-Flavour([string] $Chosen) {
    if ($Chosen) { return $Chosen }
    $kept = Join-Path $Venv '.molink-flavour'
    if (Test-Path -LiteralPath $kept) { return (Get-Content -LiteralPath $kept -TotalCount 1 -Encoding UTF8).Trim() }
    if (Get-Output @('nvidia-smi') @('-L')) { return 'cuda' }
    return 'cpu'
}

function Get-InstalledTorch {
    if (-not (Test-Path -LiteralPath $VenvPython)) { return $null }
    return Get-Output @($VenvPython) @(
        '-c', "from importlib.metadata import version; print(version('torch'))")
}

function Get-FreeMegabytes {
    try {
        $disk = [System.IO.Path]::GetPathRoot($Root)
        return [long] ((New-Object System.IO.DriveInfo $disk).AvailableFreeSpace / 1mb)
    } catch { return $null }
}

function Test-PathLength {
    if ($Root.Length -le $LongestRoot) { return }
    $settings = 'HKEY_LOCAL_MACHINE\SYSTEM\CurrentControlSet\Control\FileSystem'
    if ([Microsoft.Win32.Registry]::GetValue($settings, 'LongPathsEnabled', 0) -eq 1) { return }
    Die "the path of this folder is too long for Windows: ${Root} has $($Root.Length) characters",
        "move the clone to a path of at most $LongestRoot, such as C:\molink, or allow long paths (in PowerShell as administrator):",
        'New-ItemProperty -Path HKLM:\SYSTEM\CurrentControlSet\Control\FileSystem -Name LongPathsEnabled -Value 1 -PropertyType DWORD -Force'
}

function Test-Disk([string] $Flavour) {
    $need = $NeedCpu
    if ($Flavour -eq 'cuda') { $need = $NeedCuda }
    if (Get-InstalledTorch) { $need = $NeedUpdate }
    $free = Get-FreeMegabytes
    if ($null -ne $free -and $free -lt $need) {
        Die "the disk is too full: $free MB free for $Root, about $need MB needed",
            'free some space, or clone molink onto another disk'
    }
}

function Stop-WithReason([string] $What) {
    $free = Get-FreeMegabytes
    $noSpace = (Test-Path -LiteralPath $Log) -and
        (Select-String -LiteralPath $Log -Pattern 'No space left|Errno 28|WinError 112' -Quiet)
    if ($noSpace -or ($null -ne $free -and $free -lt 100)) {
        Die "the disk is full (${What}): $free MB are free", 'free some space and run this again'
    }
    if (Test-Path -LiteralPath $Log) {
        Write-Host ''
        Write-Host "The last lines of ${Log}:"
        # Without the indented lines, which are the frames of a traceback.
        Get-Content -LiteralPath $Log -Encoding UTF8 | Where-Object { $_ -notmatch '^\S+  ' } | Select-Object -Last 8 |
            ForEach-Object { Write-Host $_ }
    }
    Die "$What failed",
        'is the network there, and HTTPS_PROXY set if it needs one? Run this again to continue.',
        "torch has builds for Python 3.11 to 3.14: name another with --python PATH."
}

# Runs the venv's Python on the console; whether it succeeded is in $LASTEXITCODE.
function Invoke-Python([string[]] $Arguments) {
    $ErrorActionPreference = 'Continue'
    & $VenvPython @Arguments
}

function Install-Package([string] $What, [string[]] $Arguments) {
    if (Test-Path -LiteralPath $Log) { Remove-Item -LiteralPath $Log }
    $pip = @('-m', 'pip', 'install', '--disable-pip-version-check', '--no-input', '--log', $Log)
    Invoke-Python ($pip + $Arguments)
    if ($LASTEXITCODE -ne 0) { Stop-WithReason $What }
}

function Initialize-Venv([string] $Named, [string] $Flavour) {
    $mark = Join-Path $Venv '.molink-clone'
    $command = $null
    if ($Named) { $command = Find-Python $Named }
    if (Test-Path -LiteralPath $Venv) {
        $version = $null
        if (Test-Path -LiteralPath $VenvPython) { $version = Get-PythonVersion @($VenvPython) }
        $usable = (Test-NewEnough $version) -and (Get-Output @($VenvPython) @('-m', 'pip', '--version'))
        # Scripts in a venv hold its path: a moved clone needs a new one.
        if ((Test-Path -LiteralPath $mark) -and (Get-Content -LiteralPath $mark -TotalCount 1 -Encoding UTF8) -ne $Root) { $usable = $false }
        if ($command -and (Get-PythonVersion $command) -ne $version) { $usable = $false }
        if ($usable) { return }
        Say "The .venv here can't be used (moved, broken or of another Python): recreating it"
    }
    if (-not $command) { $command = Find-Python '' }
    if ($null -eq (Get-Output $command @('-c', 'import venv, ensurepip'))) {
        Die "$($command -join ' ') lacks the venv module", 'install Python from python.org, then run this again'
    }
    Test-Disk $Flavour
    Say "Making .venv with $($command -join ' ') ($(Get-PythonVersion $command))"
    if (Test-Path -LiteralPath $Venv) { Remove-Item -Recurse -Force -LiteralPath $Venv }
    if ($null -eq (Get-Output $command @('-m', 'venv', $Venv))) { Stop-WithReason 'making .venv' }
    Set-Content -LiteralPath $mark -Value $Root -Encoding UTF8
}

# What .venv holds once this script has succeeded with the same files and options.
function Get-State([string] $Extra, [string] $Flavour) {
    $files = @('pyproject.toml', 'requirements\base.txt', 'requirements\test.txt',
        'requirements\torch.txt')
    $hashes = $files | ForEach-Object {
        (Get-FileHash -Algorithm SHA256 -LiteralPath (Join-Path $Root $_)).Hash
    }
    return "$($hashes -join ' ') $Flavour $Extra"
}

function Test-Installed([string] $Extra, [string] $Flavour) {
    $stamp = Join-Path $Venv ".molink-$Extra"
    return (Test-Path -LiteralPath $stamp) -and
        (Get-Content -LiteralPath $stamp -TotalCount 1 -Encoding UTF8) -eq (Get-State $Extra $Flavour)
}

function Install-Molink([string] $Extra, [string] $Flavour) {
    if (Test-Installed $Extra $Flavour) { return }
    if ($Extra -eq 'base' -and (Test-Installed 'test' $Flavour)) { return }
    Test-Disk $Flavour
    Say 'Installing what molink needs, by the hashes in requirements\'
    $locks = @('-r', 'requirements/base.txt')
    if ($Extra -ne 'base') { $locks += @('-r', "requirements/$Extra.txt") }
    Install-Package 'installing what molink needs' (@('--require-hashes', '--no-deps') + $locks)
    Say 'Installing molink'
    Install-Package 'installing molink' @('--no-deps', '--no-build-isolation', '-e', '.')
    Say 'Installing torch'
    Invoke-Python @('-m', 'molinkd', 'setup', "--$Flavour", '--lock', 'requirements\torch.txt')
    if ($LASTEXITCODE -ne 0) { exit 1 }
    Set-Content -LiteralPath (Join-Path $Venv ".molink-$Extra") -Value (Get-State $Extra $Flavour) -Encoding UTF8
}

function Assert-Release([hashtable] $Options) {
    if ($Options.Test) { Die '--test needs a clone of the repository' }
    if (-not $Options.From) { Die 'there is no clone of molink here', 'say where releases are: --from URL' }
    if ($Options.From -notmatch '^(https://|http://(127\.0\.0\.1|localhost)[:/])') {
        Die "--from $($Options.From): releases come by https alone"
    }
    if (-not (Test-Path -LiteralPath $Root)) { New-Item -ItemType Directory -Path $Root | Out-Null }
}

# A file of the release, into $Download.
function Get-ReleaseFile([string] $From, [string] $Name) {
    $fetch = 'import socket, sys, urllib.request; socket.setdefaulttimeout(60); urllib.request.urlretrieve(*sys.argv[1:])'
    Invoke-Python @('-c', $fetch, "$From/$Name", (Join-Path $Download $Name))
    if ($LASTEXITCODE -ne 0) {
        Die "$Name can't be fetched", 'is the network there, and HTTPS_PROXY set if it needs one?'
    }
}

# Nothing is installed before all of it is here with the right hashes.
function Install-Release([string] $From, [string] $Flavour) {
    $From = $From.TrimEnd('/')
    if (Get-Output @($VenvPython) @('-m', 'molinkd', '--version')) {
        Invoke-Python @('-m', 'molinkd', 'update', '--from', $From)
        if ($LASTEXITCODE -ne 0) { exit 1 }
    } else {
        Test-Disk $Flavour
        Say "Fetching molink from $From"
        if (Test-Path -LiteralPath $Download) { Remove-Item -Recurse -Force -LiteralPath $Download }
        New-Item -ItemType Directory -Path $Download | Out-Null
        Get-ReleaseFile $From 'SHA256SUMS'
        $sums = Get-Content -LiteralPath (Join-Path $Download 'SHA256SUMS') -Encoding UTF8
        $wheel = $sums | Where-Object { $_ -match '^[0-9a-f]{64}  molink-[0-9.]+-py3-none-any\.whl$' } |
            ForEach-Object { ($_ -split '  ')[1] } | Select-Object -First 1
        if (-not $wheel) { Die "$From/SHA256SUMS names no wheel of molink" }
        foreach ($name in @($wheel, 'requirements.txt')) {
            Get-ReleaseFile $From $name
            $hash = (Get-FileHash -Algorithm SHA256 -LiteralPath (Join-Path $Download $name)).Hash.ToLowerInvariant()
            if ($sums -notcontains "$hash  $name") {
                Die "$name of $From does not have the hash that SHA256SUMS says", 'run this again later'
            }
        }
        Say 'Installing molink and what it needs'
        Install-Package 'installing molink' @('--require-hashes', '--no-deps', '-r', 'download/requirements.txt')
        Install-Package 'installing molink' @('--no-deps', (Join-Path $Download $wheel))
        Remove-Item -Recurse -Force -LiteralPath $Download
    }
    Say 'Installing torch'
    Invoke-Python @('-m', 'molinkd', 'setup', "--$Flavour")
    if ($LASTEXITCODE -ne 0) { exit 1 }
}

# Puts a copy of molink.exe (which knows where its Python is) into a folder of its own on the user's
# PATH, where --path or a person says so; .venv\Scripts there would put this Python before others.
function Add-ToPath([bool] $Wanted) {
    $folder = Join-Path $env:LOCALAPPDATA 'Programs\molink'
    $copy = Join-Path $folder 'molink.exe'
    $key = Get-Item -LiteralPath 'HKCU:\Environment'
    $before = $key.GetValue('Path', '', 'DoNotExpandEnvironmentNames')
    $parts = @($before -split ';' | Where-Object { $_ })
    $known = ($parts -contains $folder) -and (Test-Path -LiteralPath $copy)
    if (-not $known -and -not $Wanted) {
        if ([Console]::IsInputRedirected -or -not [Environment]::UserInteractive) {
            Write-Host "To call it as molink from any folder: install.ps1 --path (makes a copy in $folder)"
            return
        }
        $answer = Read-Host "Put molink on your PATH, by a copy in $folder? [y/N]"
        if ($answer -notmatch '^(y|yes)$') { return }
    }
    if (-not (Test-Path -LiteralPath $folder)) { New-Item -ItemType Directory -Path $folder | Out-Null }
    Copy-Item -LiteralPath (Join-Path $Venv 'Scripts\molink.exe') -Destination $copy -Force
    if ($parts -notcontains $folder) {
        Set-ItemProperty -LiteralPath 'HKCU:\Environment' -Name 'Path' -Type ExpandString `
            -Value ((@($parts) + $folder) -join ';')
        # Tells other programs that the environment has changed.
        [Environment]::SetEnvironmentVariable('MOLINK_INSTALLED', $null, 'User')
    }
    if (-not $known) { Write-Host "In a new terminal molink can be called from any folder ($copy)" }
}

function Invoke-Check([string] $Name, [string[]] $Arguments) {
    Say $Name
    Invoke-Python $Arguments
    if ($LASTEXITCODE -ne 0) { Die "the check failed: $Name" }
}

function Invoke-Checks {
    Invoke-Check 'pip check' @('-m', 'pip', 'check', '--disable-pip-version-check')
    Invoke-Check 'ruff check' @('-m', 'ruff', 'check', '.')
    Invoke-Check 'ruff format --check' @('-m', 'ruff', 'format', '--check', '.')
    Invoke-Check 'mypy' @('-m', 'mypy')
    Invoke-Check 'lint-imports' @(
        '-c', 'from importlinter.cli import lint_imports_command; lint_imports_command()')
    Invoke-Check 'pytest' @(
        '-m', 'pytest', '--color=no', '-n', 'logical', '--maxprocesses', '4', '--dist', 'loadfile')
}

$options = Read-Options $args
if ($options.Help) {
    Write-Host $Usage
    exit 0
}
if (-not $InClone) {
    Assert-Release $options
    $options.Path = $true
}
Set-Location -LiteralPath $Root
$env:PYTHONUTF8 = '1'
Test-PathLength
$flavour = Get-Flavour $options.Flavour
Initialize-Venv $options.Python $flavour
if ($options.Flavour) {
    Set-Content -LiteralPath (Join-Path $Venv '.molink-flavour') -Value $flavour -Encoding UTF8
}
if ($InClone) {
    $extra = 'base'
    if ($options.Test) { $extra = 'test' }
    Install-Molink $extra $flavour
} else {
    Install-Release $options.From $flavour
}
if ($options.Test) { Invoke-Checks }
if ($options.Path) { Add-ToPath $true }
if ($options.Demo) {
    $demo = @('-m', 'molinkd', 'demo')
    if ($null -ne $options.Ask) {
        $ask = $options.Ask
        # Before 7.3 PowerShell passes quotes on to programs unescaped.
        if ($PSVersionTable.PSVersion -lt [version]'7.3') { $ask = $ask -replace '(\\*)"', '$1$1\"' }
        $demo += @('--ask', $ask)
    }
    & $VenvPython @demo
    exit $LASTEXITCODE
}
if (-not $options.Test) {
    $molink = if ($InClone) { '.venv\Scripts\molink' } else { 'molink' }
    Say "molink is installed: try $molink demo, or $molink up"
    if (-not $options.Path) { Add-ToPath $false }
}
